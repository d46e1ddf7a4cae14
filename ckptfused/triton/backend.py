"""Which kernel makes an attention call. No triton here: this runs where it is missing too."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ckptfused.spec import AttentionSpec

from .problem import Problem

BACKENDS = ("triton", "flash", "cudnn")
VARIABLE = "CKPTFUSED_ATTENTION"


def _read_override() -> str | None:
    value = os.environ.get(VARIABLE, "")
    if value and value not in BACKENDS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(BACKENDS)}, got {value!r}")
    return value or None


OVERRIDE = _read_override()  # once: forward and backward must agree


@dataclass(frozen=True)
class Shape:
    """What the choice depends on, besides the device."""

    plain: bool  # softmax over all keys, or the causal ones, and nothing else
    dtype: torch.dtype
    head_dim: int
    empty: bool  # no query, key or head

    @classmethod
    def of(cls, a: Problem) -> Shape:
        return cls(a.plain, a.q.dtype, a.q.shape[3], not a.q.numel() or not a.k.numel())

    @classmethod
    def of_spec(cls, a: AttentionSpec, dtype: torch.dtype, batch: int, length: int) -> Shape:
        """Of the call that a block makes; dtype: its compute type."""
        windowed = 0 < a.window < length
        special = a.mask != "none" or a.padding != "none" or a.packed or windowed or a.softcap != 0
        return cls(not special and round(a.p_attn * 65536) == 0, dtype, a.head_dim, not batch * length)


def attention_backend(shape: Shape, capability: tuple[int, int], override: str | None = OVERRIDE) -> tuple[str, str]:
    """(name, reason), the same for forward and backward: a pure function of its arguments.

    override: wanted where it can do the job; elsewhere the choice is as without it.
    """
    wanted = f"{VARIABLE}={override}"
    obstacle = _obstacle(shape, capability)
    if obstacle:
        return "triton", obstacle
    if override == "cudnn" and shape.head_dim > 128:
        return "flash", f"{wanted}, but cuDNN's kernel takes head widths up to 128"
    if override:
        return override, wanted
    return "flash", "softmax over all or the causal keys in half precision, and nothing else"


def _obstacle(shape: Shape, capability: tuple[int, int]) -> str:
    """Why PyTorch's kernels cannot be used; empty if they can."""
    if not shape.plain:
        return "masks, window, soft cap, dropout, packed sequences or unequal lengths"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"{shape.dtype}: PyTorch's kernels are for half precision"
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= 256:
        return f"head width {shape.head_dim}: PyTorch's kernels take multiples of 8 up to 256"
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: PyTorch's kernels need 8.0"
    return "nothing to compute" if shape.empty else ""
