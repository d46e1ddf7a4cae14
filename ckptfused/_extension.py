"""Loads the C++ extension, which registers the ops, and says how it was built."""

from __future__ import annotations

from types import ModuleType

import torch

__all__ = ["build_info"]


_REBUILD = (
    "Rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps ckptfused "
    "(or, in a checkout, pip install --no-build-isolation -e .)."
)


def _load() -> ModuleType:
    try:
        from ckptfused import _C
    except ImportError as error:
        if not str(error.name or "").endswith("_C") and "undefined symbol" not in str(error):
            raise
        raise ImportError(
            "ckptfused's extension cannot be loaded: it is not built, or it was built against another PyTorch than "
            f"{torch.__version__}, the one at hand. {_REBUILD} The loader said: {error}"
        ) from error
    built_against = _C.torch_version
    if built_against != torch.__version__:
        raise ImportError(
            f"ckptfused was built against PyTorch {built_against}, but {torch.__version__} is imported. {_REBUILD}"
        )
    return _C


_C = _load()


def build_info() -> dict[str, object]:
    """How the extension was built and what it uses here.

    Keys: `version`; `torch`, the version built against; `cuda_architectures`, a tuple such as ("sm_80", "sm_90",
    "compute_90"), where compute_ is PTX for newer GPUs, empty in a CPU build;
    `cpu_target`, the instruction set that the CPU kernels use (`avx512`, `avx2` or `baseline`).
    """
    return {
        "version": _C.version,
        "torch": _C.torch_version,
        "cuda_architectures": tuple(_C.cuda_architectures.split()),
        "cpu_target": _C.cpu_target(),
    }
