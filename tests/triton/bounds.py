"""Bounds of every load and store of an interpreted kernel: only elements of the argument that its pointer comes from.

A read beside a tensor is silent on a CPU and on a GPU, for there is mostly something there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

_elements: dict[int, np.ndarray] = {}
"""Sorted addresses of the elements of each tensor of a launch, by its own address."""


def _addresses(t: Tensor) -> np.ndarray:
    found = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        found = found[..., None] + torch.arange(size) * (stride * t.element_size())
    return np.unique(found.numpy() + t.data_ptr()).astype(np.uint64)


def _following(make: Callable[..., Any], pointer_at: int) -> Callable[..., Any]:
    """What makes pointers of a pointer: they remember the first one's address."""

    def made(self: Any, *args: Any) -> Any:
        result, pointer = make(self, *args), args[pointer_at]
        if pointer.dtype.is_ptr():
            result.attr["base"] = _base(pointer)
        return result

    return made


def _base(pointer: Any) -> int:
    return pointer.attr.get("base", int(pointer.data.flat[0]))


def _checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """A masked load or store that raises instead of touching what is not the argument's."""

    def checked(self: Any, pointer: Any, *rest: Any) -> Any:
        places, mask = np.broadcast_arrays(pointer.data, rest[mask_at].data)
        touched = places[mask.astype(bool)]
        if touched.size == 0:
            return access(self, pointer, *rest)
        own = _elements[_base(pointer)]
        inside = own[np.minimum(np.searchsorted(own, touched), own.size - 1)] == touched
        if not inside.all():
            raise IndexError(f"{access.__name__}: {np.count_nonzero(~inside)} of {touched.size} are out of bounds")
        return access(self, pointer, *rest)

    return checked


def watch() -> None:
    """From now on every launch is watched."""
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _elements.clear()
        for t in (*args, *kwargs.values()):
            if isinstance(t, Tensor) and t.numel() > 0:  # the parts of a joint buffer may begin at one address
                known = _elements.get(t.data_ptr(), np.empty(0, np.uint64))
                _elements[t.data_ptr()] = np.union1d(known, _addresses(t))
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launched
    for name, pointer_at in (("addptr", 0), ("splat", 1), ("broadcast", 0), ("expand_dims", 0)):
        setattr(builder, f"create_{name}", _following(getattr(builder, f"create_{name}"), pointer_at))
    for name, mask_at in (("load", 0), ("store", 1)):
        setattr(builder, f"create_masked_{name}", _checked(getattr(builder, f"create_masked_{name}"), mask_at))
