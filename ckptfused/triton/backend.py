"""Which kernel makes an attention call on a GPU, as csrc/ops/attention_gpu.h chooses.

No triton here: this runs where it is missing too.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

from ckptfused._extension import _C
from ckptfused.spec import AttentionSpec

BACKENDS = ("triton", "flash", "cudnn")
VARIABLE = "CKPTFUSED_ATTENTION"
HOPPER = (9, 0)  # assumed where there is no GPU
_CUDNN = 91900  # likewise: torch 2.11's


def _read_override() -> str | None:
    value: str = _C.attention_override  # read once: forward and backward must agree
    if value and value not in BACKENDS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(BACKENDS)}, got {value!r}")
    return value or None


OVERRIDE = _read_override()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def capability_at_hand() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER


def _cudnn_version() -> int:
    """Version of the cuDNN at hand; without a GPU, of the one that torch 2.11 comes with."""
    return (torch.backends.cudnn.version() or 0) if torch.cuda.is_available() else _CUDNN


@dataclass(frozen=True)
class AttentionShape:
    """What the choice depends on, besides the device and PyTorch's settings."""

    special: tuple[str, ...]  # of _C.attention_special: what PyTorch's kernels do not do
    dtype: torch.dtype
    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def bits(self) -> int:
        """The special ones as C++ takes them."""
        return sum(1 << i for i, name in enumerate(_C.attention_special) if name in self.special)

    @classmethod
    def of_spec(cls, a: AttentionSpec, dtype: torch.dtype, batch: int, length: int) -> AttentionShape:
        """The shape of the call that a block makes; dtype: its compute type."""
        there = (
            *(a.mask != "none", a.padding != "none", a.packed),
            *(0 < a.window < length, a.softcap, round(a.p_attn * 65536)),
            a.scale is not None and not a.scale >= _C.attention_least_scale,
        )
        special = tuple(name for name, is_there in zip(_C.attention_special, there, strict=True) if is_there)
        return cls(special, dtype, batch, a.heads, length, a.head_dim)


def attention_backend(
    shape: AttentionShape, capability: tuple[int, int], override: str | None = OVERRIDE, cudnn: int | None = None
) -> tuple[str, str]:
    """(name, reason) of a call under PyTorch's present settings.

    override: wanted where it can do the job; elsewhere the choice is as without it. cudnn: the library's version as it
    numbers itself; None: of the one at hand.
    """
    sizes = (shape.batch, shape.heads, shape.length, shape.length, shape.head_dim)
    gpu = (*capability, _cudnn_version() if cudnn is None else cudnn)
    name, reason = _C.attention_choice(shape.bits, str(shape.dtype).removeprefix("torch."), sizes, gpu, override or "")
    return name, reason
