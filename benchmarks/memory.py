"""What a call allocates: its peak, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ckptfused.profiler.allocator import CPUAllocator, CUDAAllocator


@dataclass(frozen=True)
class Memory:
    """Bytes above what was there before the call."""

    peak: int
    """The most at a time."""
    lasting: int
    """What the call left behind, while its result is held."""
    transient_peak: int
    """The most at a time, leaving out what lasts: of a training step whose gradients are made anew, those."""


def memory_of(function: Callable[[], object], device: str = "cpu") -> Memory:
    """The memory of a call on the CPU or a GPU."""
    results: list[object] = []
    allocator = CUDAAllocator(torch.device(device)) if device == "cuda" else CPUAllocator()
    changes = allocator.record(lambda: results.append(function())).changes
    released = {change.number for change in changes if change.size < 0}
    sizes = [change.size for change in changes]
    passing = [change.size for change in changes if change.number in released]
    return Memory(_peak(sizes), sum(sizes), _peak(passing))


def _peak(steps: Iterable[int]) -> int:
    now = most = 0
    for step in steps:
        now += step
        most = max(most, now)
    return most
