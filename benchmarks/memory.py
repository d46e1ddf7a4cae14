"""What a call allocates on the CPU: every allocation and release of PyTorch's allocator there, by its profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Memory:
    """Bytes above what was there before the call."""

    peak: int
    """The most at a time."""
    lasting: int
    """What the call left behind, while its result is held."""
    transient_peak: int
    """The most at a time, leaving out what lasts: of a training step whose gradients are made anew, those."""


def memory_of(function: Callable[[], object]) -> Memory:
    """The memory of a call.

    **Source** PyTorch's profiler: the allocations and releases of its CPU allocator, in the order of time.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    changes = sorted(_changes(recorded.profiler.kineto_results.experimental_event_tree()))
    del result
    live: dict[int, int] = {}  # place in `steps` by address
    steps: list[int] = []
    released = set()
    for _, address, size in changes:
        if size > 0:
            live[address] = len(steps)
        elif address in live:
            released.add(live.pop(address))
            released.add(len(steps))
        else:
            continue  # was there before
        steps.append(size)
    passing = [size if place in released else 0 for place, size in enumerate(steps)]
    return Memory(_peak(steps), sum(steps), _peak(passing))


def _peak(steps: Iterable[int]) -> int:
    now = most = 0
    for step in steps:
        now += step
        most = max(most, now)
    return most


def _changes(events: Iterable[object]) -> Iterator[tuple[int, int, int]]:
    """Time, address and signed bytes of each allocation and release."""
    for event in events:
        fields = event.extra_fields  # type: ignore[attr-defined]
        if type(fields).__name__ == "_ExtraFields_Allocation":
            yield event.start_time_ns, fields.ptr, fields.alloc_size  # type: ignore[attr-defined]
        yield from _changes(event.children)  # type: ignore[attr-defined]
