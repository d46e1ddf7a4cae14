"""How a weight that a library keeps in few bits is stored, and whether it still is by the time of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import autocast_enabled, has_values, is_dtensor
from ckptfused.compat.torch_memory import storage_id
from ckptfused.layer.parts import Reason


class Stored(NamedTuple):
    """How a weight is stored: as the fields of `spec.Quantized`, the tensors beside it, and the shape [out, in] of the
    numbers."""

    form: tuple[Any, ...]
    """kind, block, nested, scales, strided; the last ones may be left out."""
    state: tuple[Tensor | None, ...]
    """scale, offset, nested_scale, table."""
    shape: tuple[int, ...]
    check: Callable[[], None] | None = None
    """For before a backward: **raises** `RuntimeError` where the module has another weight or state now."""


Weight = tuple[Tensor, Stored] | Reason


def with_check(
    found: tuple[Tensor, Stored], module: nn.Module, read: Callable[[nn.Module], Weight | None], name: str
) -> Stored:
    """How it is stored, with the check that the module has no other weight or state by the time of a backward.

    read: reads the module once more; None where it is not stored in few bits any more.
    """
    codes, stored = found
    if torch.compiler.is_compiling() or not has_values(codes):
        return stored
    owner, device = weakref.ref(module), codes.device.type
    before = [_Place(t) for t in (codes, *stored.state)]

    def check() -> None:
        module = owner()
        if module is None or any(map(is_dtensor, module.parameters())):  # FSDP2 has shards there in between
            return
        with torch.autocast(device, enabled=False):
            now = read(module)
        if isinstance(now, Reason):  # in evaluation, for instance, where the next forward would not be fused
            return
        if now is None or not all(place.has(t) for place, t in zip(before, (now[0], *now[1].state), strict=True)):
            raise RuntimeError(
                f"{name}: its quantized weight, or the state of it, was replaced between forward and backward "
                "(by a merge, for instance): call backward first"
            )

    return stored._replace(check=check)


class _Place:
    """Where a tensor was, which it keeps alive no longer than the graph does that has saved it."""

    def __init__(self, t: Tensor | None) -> None:
        self.tensor = None if t is None else weakref.ref(t)
        self.memory = _memory(t)

    def has(self, t: Tensor | None) -> bool:
        """Whether that is the tensor, or another one over its memory, as a library may make at each reading."""
        same = t is None if self.tensor is None else t is not None and self.tensor() is t
        return same or self.memory == _memory(t)


def _memory(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (storage_id(t), t.storage_offset(), t.shape)


def wanted_type(codes: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of the block's products: that of x, or autocast's."""
    if dtype == torch.float64 or not autocast_enabled(codes):
        return dtype
    return torch.get_autocast_dtype(codes.device.type)
