"""What was built, and which kernels it uses here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from ckptfused._extension import _C
from ckptfused.triton import backend, tuning

__all__ = ["build_info"]


def build_info() -> dict[str, object]:
    """How the extension was built and what it uses here.

    Keys: `version`; `torch`, the version built against; `cuda_architectures`, a tuple such as ("sm_80", "sm_90",
    "compute_90"), where compute_ is PTX for newer GPUs, empty in a CPU build; `cpu_target`, the instruction set that
    the CPU kernels use (`avx512`, `avx2` or `baseline`); `triton`, its version or None; `attention` and `ffn`, what
    CKPTFUSED_ATTENTION and CKPTFUSED_FFN ask for on a GPU, or "by shape" (`ckptfused.explain` says what a shape gets).
    """
    try:
        triton = installed("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "version": _C.version,
        "torch": _C.torch_version,
        "cuda_architectures": tuple(_C.cuda_architectures.split()),
        "cpu_target": _C.cpu_target(),
        "triton": triton,
        "attention": backend.OVERRIDE or "by shape",
        "ffn": tuning.override() or "by shape",
    }
