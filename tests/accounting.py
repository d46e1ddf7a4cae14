"""What a call saves, allocates and multiplies, as PyTorch itself counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def saved_bytes(function: Callable[[], Tensor], module: torch.nn.Module | None = None, own: Iterable[Tensor] = ()) -> int:
    """Bytes of the unique storages that autograd saves in a call, less the module's and the caller's `own`."""
    owned = [*own, *(() if module is None else (*module.parameters(), *module.buffers()))]
    ignored = {t.untyped_storage().data_ptr() for t in owned}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in ignored:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function()
    del y
    return sum(storages.values())


class Events:
    """The aten events and the allocations of a call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
            self.result = function()
        self._events = list(prof.events())
        self._memory = [
            event.extra_fields for event in _flatten(prof.profiler.kineto_results.experimental_event_tree()) if _is_allocation(event)
        ]

    def live_bytes(self) -> int:
        """Bytes allocated in the call and not freed by its end."""
        return sum(m.alloc_size for m in self._memory)

    def peak_bytes(self) -> int:
        """The most bytes that were allocated at a time, above what was there before."""
        total = peak = 0
        for m in self._memory:
            total += m.alloc_size
            peak = max(peak, total)
        return peak

    def product_flops(self) -> int:
        """FLOPs of all two-dimensional matrix products."""
        flops = 0
        for event in self._events:
            if event.name in ("aten::mm", "aten::addmm"):
                a, b = event.input_shapes[-2:] if event.name == "aten::mm" else event.input_shapes[1:3]
                if event.name == "aten::mm":
                    a, b = event.input_shapes[0], event.input_shapes[1]
                flops += 2 * a[0] * a[1] * b[1]
        return flops

    def count(self, name: str) -> int:
        """How many events have this name."""
        return sum(event.name == name for event in self._events)


def _flatten(events: Iterable[Any]) -> list[Any]:
    """All events of the tree in the order of time."""
    found, stack = [], list(events)
    while stack:
        event = stack.pop()
        found.append(event)
        stack.extend(event.children)
    return sorted(found, key=lambda event: event.start_time_ns)


def _is_allocation(event: Any) -> bool:
    return type(event.extra_fields).__name__ == "_ExtraFields_Allocation"
