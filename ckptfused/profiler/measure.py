"""A step measured where the model is: its memory by the device's allocator, its time by the device's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ckptfused.models.describe.saved_bytes import stored_bytes
from ckptfused.profiler.allocator import CPUAllocator, CUDAAllocator
from ckptfused.profiler.analysis import profile_of
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, Marks, run_step
from ckptfused.profiler.trace import Trace
from ckptfused.simulate.autocast import named, region
from ckptfused.simulate.meta_copy import buckets, held
from ckptfused.state.snapshot import Unchanged, drawn_alike

TIMED = 3
"""Steps, of whose times the median counts."""


def measured(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    autocast: torch.dtype | None = None,
    gradient_accumulation_steps: int = 1,
) -> Profile:
    """The profile of steps that run: one before anything is measured, `TIMED` for their time, one for its memory.

    **Raises** `ValueError` for a device that is neither a CPU nor a CUDA GPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a model on a CPU or a CUDA GPU, got one on {device}")
    step = None if optimizer is None else optimizer.step

    def run(marks: Marks[Any]) -> list[int]:
        return run_step(model, batch, step, marks, region(device.type, autocast), gradient_accumulation_steps)

    with Unchanged(model, batch, optimizer):
        with drawn_alike(model):
            run(Marks(model, lambda: None))
        seconds = _seconds(model, run, device)
        trace, fragmentation = _record(model, batch, optimizer, device, run, seconds)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return profile_of(
        trace,
        name,
        "measured",
        fragmentation=fragmentation,
        autocast=named(autocast),
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


Run = Callable[[Marks[Any]], list[int]]


def _seconds(model: nn.Module, run: Run, device: torch.device) -> list[float]:
    """Seconds of each stretch of a step."""
    clock = _GPUClock(device) if device.type == "cuda" else _CPUClock()
    runs = []
    for _ in range(TIMED):
        with drawn_alike(model), Marks(model, clock.now) as marks:
            run(marks)
        stamps = [*marks.found, (clock.now(), marks.found[-1][1])]
        runs.append([clock.between(a, b) for (a, _), (b, _) in zip(stamps, stamps[1:], strict=False)])
    return [median(times) for times in zip(*runs, strict=True)]


class _CPUClock:
    def now(self) -> float:
        return time.perf_counter()

    def between(self, a: float, b: float) -> float:
        return b - a


class _GPUClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, a: Any, b: Any) -> float:
        b.synchronize()
        return a.elapsed_time(b) / 1e3


def _record(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    step: Run,
    seconds: list[float],
) -> tuple[Trace, int]:
    """The trace of a step that runs, and the allocator's fragmentation in bytes."""
    allocator = CUDAAllocator(device) if device.type == "cuda" else CPUAllocator()
    marks = Marks(model, allocator.mark)
    given: list[tuple[int, int, int]] = []  # layer, the mark before which it is given, address
    gradients: list[int] = []

    def received(layer: int, t: Tensor) -> None:
        given.append((layer, len(marks.found), t.untyped_storage().data_ptr()))

    marks.received = received

    def run() -> None:
        with marks:
            gradients.extend(step(marks))
        for _, place, address in given:
            allocator.asked[place].append(address)

    log = allocator.record(run)
    found = [(place, phase) for place, (_, phase) in zip(log.marks, marks.found, strict=True)]
    numbers = {(layer, log.numbers[place].get(address)) for layer, place, address in given}
    state = [] if optimizer is None else tree_leaves(list(optimizer.state.values()))
    trace = Trace(
        log.changes,
        found,
        {(layer, number) for layer, number in numbers if number is not None},
        seconds,
        marks.names,
        gradients,
        stored_bytes([*held(model), *tree_leaves(batch)]) + buckets(model),
        stored_bytes(state),
    )
    return trace, log.fragmentation
