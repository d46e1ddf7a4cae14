"""What PyTorch's allocators handed out while something ran: the CPU's by the profiler, a GPU's by its history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ckptfused.compat.torch_memory import record_allocations, recorded_allocations
from ckptfused.profiler.trace import Change

_MARK = "ckptfused mark"


@dataclass
class AllocatorLog:
    """Allocations and releases in order; releases of what was there before are left out, but for `begins_with`."""

    changes: list[Change] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    """Places of the marks among them."""
    numbers: list[dict[int, int]] = field(default_factory=list)
    """At each mark, the buffers of the addresses that were asked for."""
    fragmentation: int = 0
    _live: dict[int, Change] = field(default_factory=dict)
    _made: int = 0

    def begins_with(self, sizes: Mapping[int, int]) -> None:
        """Memory that is there already, whose releases are to be in the log: bytes by addresses."""
        for address, size in sizes.items():
            self._live[address] = Change(self._made, size, "")
            self._made += 1

    def changed(self, address: int, size: int, op: str) -> None:
        if size > 0:
            self._live[address] = Change(self._made, size, op)
            self._made += 1
            self.changes.append(self._live[address])
        elif size < 0 and address in self._live:
            made = self._live.pop(address)
            self.changes.append(Change(made.number, -made.size, op))

    def marked(self, addresses: Iterable[int]) -> None:
        self.marks.append(len(self.changes))
        self.numbers.append({a: self._live[a].number for a in addresses if a in self._live})


class CPUAllocator:
    """**Source** PyTorch's profiler, whose events are in the order of one clock: marks are events too."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        """Addresses whose buffers are to be found, for each mark."""

    def mark(self) -> int:
        """Which mark this is."""
        with record_function(_MARK):
            self.asked.append([])
        return len(self.asked) - 1

    def record(self, function: Callable[[], object]) -> AllocatorLog:
        with self.recording() as log:
            function()
        return log

    @contextlib.contextmanager
    def recording(self) -> Iterator[AllocatorLog]:
        """The log of what runs within, complete when it ends."""
        log = AllocatorLog()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            yield log
        events = sorted(_events(recorded.profiler.kineto_results.experimental_event_tree(), ""), key=lambda e: e[0])
        for _, address, size, op in events:
            if op == _MARK:
                log.marked(self.asked[len(log.marks)])
            else:
                log.changed(address, size, op)


def _events(tree: Iterable[Any], op: str) -> Iterator[tuple[int, int, int, str]]:
    """Time, address, signed bytes, and the outermost op, of allocations and releases; marks by their name."""
    for event in tree:
        fields = event.extra_fields
        if type(fields).__name__ == "_ExtraFields_Allocation":
            yield event.start_time_ns, fields.ptr, fields.alloc_size, op
        elif event.name == _MARK:
            yield event.start_time_ns, 0, 0, _MARK
        else:
            yield from _events(event.children, op or (event.name if event.name.startswith(("aten::", "ckpt")) else ""))


class CUDAAllocator:
    """**Source** the history of PyTorch's caching allocator. What it had handed out and taken back so far says where
    among its events a mark is. Ops have no names there.
    """

    def __init__(self, device: torch.device) -> None:
        self.asked: list[list[int]] = []
        self._device = device
        self._places: list[int] = []

    def mark(self) -> int:
        self._places.append(self._count())
        self.asked.append([])
        return len(self.asked) - 1

    def _count(self) -> int:
        """Number of allocations and releases that were asked for since the process began."""
        stats = torch.cuda.memory_stats(self._device)
        return stats["allocation.all.allocated"] + stats["allocation.all.freed"]

    def record(self, function: Callable[[], object]) -> AllocatorLog:
        with self._history():
            begin = self._count()
            function()
            end = self._count()
            torch.cuda.synchronize(self._device)
            history = recorded_allocations(self._device)
        stats = torch.cuda.memory_stats(self._device)
        log = read_history(history, end - begin, [place - begin for place in self._places], self.asked)
        log.fragmentation = max(0, stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"])
        return log

    @contextlib.contextmanager
    def _history(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what was reserved for other sizes is no part of this step's fragmentation
        torch.cuda.reset_peak_memory_stats(self._device)
        record_allocations(True)
        try:
            yield
        finally:
            record_allocations(False)


def read_history(history: Iterable[Any], count: int, places: list[int], asked: list[list[int]]) -> AllocatorLog:
    """The log of the last `count` allocations and releases of an allocator's history, with marks among them.

    history: events as in `torch.cuda.memory._snapshot()["device_traces"]`, of which those of segments, and the second
    of the two of a release, are left out.
    """
    events = [event for event in history if event["action"] in ("alloc", "free_requested")]
    log = AllocatorLog()
    marks = iter(zip(places, asked, strict=True))
    place, addresses = next(marks, (count, []))
    for index, event in enumerate(events[len(events) - count :]):
        while len(log.marks) < len(places) and place <= index:
            log.marked(addresses)
            place, addresses = next(marks, (count, []))
        sign = 1 if event["action"] == "alloc" else -1
        log.changed(event["addr"], sign * event["size"], "an allocation")
    while len(log.marks) < len(places):
        log.marked(asked[len(log.marks)])
    return log
