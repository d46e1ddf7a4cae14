"""A step measured where the model is: its memory by the device's allocator, its time by the device's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_memory import storage_address
from ckptfused.models.describe.own_forward import stored_bytes
from ckptfused.models.release import released
from ckptfused.profiler.allocator import AllocatorLog, CPUAllocator, CUDAAllocator
from ckptfused.profiler.analysis import profile_of
from ckptfused.profiler.marks import Marks
from ckptfused.profiler.optimizer_step import state_tensors
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import TrainingStep, run_step
from ckptfused.profiler.trace import Trace
from ckptfused.simulate.meta_copy import Beside, batch_bytes, buckets, model_tensors, tensors_beside, trained_in
from ckptfused.state.snapshot import Unchanged, drawn_alike, rng_states

TIMED = 3
"""Steps, of whose times the median counts."""

_ONE_AT_A_TIME = threading.RLock()
"""PyTorch's profiler is one of a process: threads whose steps are measured at once would end it."""


def measured(model: nn.Module, step: TrainingStep, device: torch.device) -> Profile:
    """The profile of steps that run: one before anything is measured, `TIMED` for their time, one for its memory.

    **Raises** `ValueError` for a device that is neither a CPU nor a CUDA GPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a model on a CPU or a CUDA GPU, got one on {device}")
    optimizer = step.optimizer_of(model)
    step = replace(step, optimizer=optimizer)

    def run(marks: Marks[Any]) -> list[int]:
        return run_step(model, step, None if optimizer is None else optimizer.step, marks)

    with released(model, optimizer if step.release else None), Unchanged(model, step.batch, optimizer):
        with drawn_alike(model):
            run(Marks(model, lambda: None))
        seconds = _seconds(model, run, device)
        allocator = CUDAAllocator(device) if device.type == "cuda" else CPUAllocator()
        beside = Beside(model)
        steps = 2 if tensors_beside(model) or trained_in(step.batch) else 1  # which begins with what the first has left
        for t in trained_in(step.batch):
            t.grad = None

        draws = rng_states(model)

        def repeated(marks: Marks[Any]) -> list[int]:
            sizes = run(marks)
            if steps > 1:
                draws.rewind()
                sizes = run(marks)
            return sizes

        log, marks, received, gradients = _record(model, repeated, allocator)
        state = [] if optimizer is None else state_tensors(optimizer)
        found = [(place, phase) for place, (_, phase) in zip(log.marks, marks.found, strict=True)]
        weights = stored_bytes(model_tensors(model)) + beside.bytes_left() + batch_bytes(step.batch) + buckets(model)
        trace = Trace(
            log.changes, found, received, steps * seconds, marks.names, gradients, weights, stored_bytes(state)
        )
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return profile_of(trace, name, "measured", step, fragmentation=log.fragmentation)


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
    model: nn.Module, step: Run, allocator: CUDAAllocator | CPUAllocator
) -> tuple[AllocatorLog, Marks[Any], set[tuple[int, int]], list[int]]:
    """What the allocator did in a step, with marks, the buffers that layers are given, and the bytes of gradients."""
    marks = Marks(model, allocator.mark)
    given: list[tuple[int, int, int]] = []  # layer, the mark before which it is given, address
    gradients: list[int] = []

    def received(layer: int, t: Tensor) -> None:
        given.append((layer, len(marks.found), storage_address(t)))

    marks.received = received

    def run() -> None:
        with marks:
            gradients.extend(step(marks))
        for _, place, address in given:
            allocator.asked[place].append(address)

    with _ONE_AT_A_TIME:
        log = allocator.record(run)
    numbers = {(layer, log.numbers[place].get(address)) for layer, place, address in given}
    return log, marks, {(layer, number) for layer, number in numbers if number is not None}, gradients
