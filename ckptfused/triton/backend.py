"""Which kernel makes an attention call. No triton here: this runs where it is missing too."""

from __future__ import annotations

import functools
import importlib.util
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


# What PyTorch's kernels do not do, beside softmax over all keys or the causal ones.
_SPECIAL = ("masks", "padding", "packed sequences", "window", "soft cap", "dropout", "unequal lengths")


def _special(*there: object) -> tuple[str, ...]:
    return tuple(name for name, is_there in zip(_SPECIAL, there, strict=True) if is_there)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Shape:
    """What the choice depends on, besides the device."""

    special: tuple[str, ...]  # those of _SPECIAL that are asked for
    dtype: torch.dtype
    head_dim: int
    empty: bool  # no query, key or head

    @classmethod
    def of(cls, a: Problem) -> Shape:
        packed, unequal = a.cu_seqlens is not None, a.q.shape[2] != a.k.shape[2]
        special = _special(a.mask_kind, a.padding_kind, packed, a.window, a.softcap, a.threshold, unequal)
        return cls(special, a.q.dtype, a.q.shape[3], not a.q.numel() or not a.k.numel())

    @classmethod
    def of_spec(cls, a: AttentionSpec, dtype: torch.dtype, batch: int, length: int) -> Shape:
        """Of the call that a block makes; dtype: its compute type."""
        masked, padded, windowed = a.mask != "none", a.padding != "none", 0 < a.window < length
        special = _special(masked, padded, a.packed, windowed, a.softcap, round(a.p_attn * 65536), False)
        return cls(special, dtype, a.head_dim, not batch * length)


def attention_backend(shape: Shape, capability: tuple[int, int], override: str | None = OVERRIDE) -> tuple[str, str]:
    """(name, reason): a pure function of its arguments, so that forward and its replay agree.

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


def backward_backend(name: str) -> str:
    """The kernel of backward for an o and lse that kernel `name` made: its own, but that cuDNN's has no repeatable form
    in PyTorch. Flash's reads the same o and lse."""
    return "flash" if name == "cudnn" and torch.are_deterministic_algorithms_enabled() else name


def _obstacle(shape: Shape, capability: tuple[int, int]) -> str:
    """Why PyTorch's kernels cannot be used; empty if they can."""
    if shape.special:
        return f"PyTorch's kernels have no {', no '.join(shape.special)}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"{shape.dtype}: PyTorch's kernels are for half precision"
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= 256:
        return f"head width {shape.head_dim}: PyTorch's kernels take multiples of 8 up to 256"
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: PyTorch's kernels need 8.0"
    return "nothing to compute" if shape.empty else ""
