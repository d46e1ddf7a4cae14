"""Layers that put two tensors side by side, x and a text say, and return what becomes of both (Flux's blocks)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ckptfused.compat.torch_memory import storage_id
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value

Streams = tuple[tuple[str, int], ...]
"""The names of streams in the order of their tokens, and the places of what becomes of them among what is returned."""


def both_streams(
    calls: Iterable[Recorded], streams: tuple[Value, ...], ends: list[Value], leaves: list[Any]
) -> tuple[Value, Value, Streams]:
    """The x that two streams are made into, by the one call that takes them, and the result of which those that are
    returned are parts. leaves: what the forward returned. **Raises** `RefusedError` of other layers.
    """
    readers = [call for call in calls if not {*streams}.isdisjoint(call.inputs)]
    if len(readers) != 1 or readers[0].op != "cat" or readers[0].given(1, "dim", 0) not in (1, -2):
        raise RefusedError("its first two arguments are not put side by side", next(iter(readers), None))
    (join,) = readers
    wholes = {end.call.inputs[0] for end in ends if end.call is not None and end.call.inputs}
    whole = wholes.pop() if len(wholes) == 1 else ends[0]
    if {*join.inputs} != {*streams} or len(join.inputs) != 2 or whole.shape != join.values[0].shape:
        raise RefusedError("what is returned is not in parts what its first two arguments are", whole.call)
    found: Streams = ()
    for v, part in zip(join.inputs, whole.data.split([v.shape[1] for v in join.inputs], 1), strict=True):
        places = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and _is_part(t, part)]
        if len(places) != 1 or len(ends) != 2:
            raise RefusedError("what is returned is not in parts what its first two arguments are", whole.call)
        found += ((v.name, places[0]),)
    return join.values[0], whole, found


def _is_part(t: Tensor, part: Tensor) -> bool:
    """Whether one is the other, and has a graph where that has one."""
    return all(
        told(t) == told(part)
        for told in (storage_id, Tensor.storage_offset, Tensor.stride, lambda t: t.shape, lambda t: t.grad_fn is None)
    )
