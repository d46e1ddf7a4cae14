"""Steps taken on meta tensors, one after the other, under all that watches them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import without_dispatch_modes
from ckptfused.cost import OpenLedger
from ckptfused.models.describe.own_forward import stored_bytes
from ckptfused.models.release import released, releases_of
from ckptfused.profiler.left_behind import Quieted, numbers_put_back, steps_until_quiet
from ckptfused.profiler.marks import Marks
from ckptfused.profiler.optimizer_step import state_tensors, step_of
from ckptfused.profiler.step import TrainingStep, run_step
from ckptfused.profiler.trace import Trace, changes_of
from ckptfused.simulate.devices import Device
from ckptfused.simulate.fast_path import measured_fast_paths
from ckptfused.simulate.functions import functions_for_meta
from ckptfused.simulate.made_by_name import MadeByName
from ckptfused.simulate.meta_copy import batch_bytes, data_behind, model_tensors, tensors_beside, without_data
from ckptfused.simulate.roofline import Work
from ckptfused.simulate.unseen import compiled_calls_noted
from ckptfused.simulate.values import KnownValues, tensors_with_values
from ckptfused.state.snapshot import drawn_alike, rng_states
from ckptfused.state.undone import without_trace


class Watchers(NamedTuple):
    """What watches predicted steps."""

    opened: OpenLedger
    marks: Marks[int]
    work: Work

    @classmethod
    def of(cls, model: nn.Module, device: Device) -> Watchers:
        """One for a model on a device."""
        opened = OpenLedger(device.kind)
        return cls(opened, Marks(model, opened.__len__), Work(device, opened))


class StepsTaken(NamedTuple):
    """The trace of a predicted step, and what it and those beside it came to."""

    trace: Trace
    steps: Quieted
    seen: Watchers
    by_chance: bool
    """Whether the model chose by chance what to do."""
    asked: bool
    """Whether it asked for a number that nobody knows."""


def steps_taken(model: nn.Module, step: TrainingStep, at_once: bool, seen: Watchers, quiet: int) -> StepsTaken:
    """What predicted steps come to, of which nothing is left. at_once: whether the optimizer's is one kernel that
    allocates nothing.
    """
    opened, marks, work = seen
    received: set[tuple[int, int]] = set()
    seconds: list[float] = []
    gradients: list[int] = []
    ends: list[int] = []

    def given(layer: int, t: Tensor) -> None:
        number = opened.number_of(t) if t.is_meta else None
        if number is not None:
            received.add((layer, number))

    def now() -> int:
        work.in_backward.keep()
        return len(opened)

    def spend(took: float) -> None:
        seconds.extend([0.0] * (len(marks.found) - len(seconds)))
        seconds[-1] += took

    work.spend, device = spend, work.device
    marks.received, marks.stamp = given, now
    twins, optimizer = without_data(step.batch), step.optimizer_of(model)
    weights = stored_bytes(model_tensors(model)) + batch_bytes(step.batch)
    state = 0 if optimizer is None else stored_bytes(state_tensors(optimizer))
    kernel = lambda: spend(_bytes_of_step(optimizer) / device.copy)  # noqa: E731
    optimize = None if optimizer is None else kernel if at_once else step_of(optimizer)
    updates = released(model, optimizer if step.release else None, optimize)
    known, named = _known_values(model, step, twins), MadeByName()
    on_cpu = named if device.kind == "cpu" else nullcontext()
    fast = measured_fast_paths(model, work)
    draws = rng_states(model)
    watching: tuple[AbstractContextManager[Any], ...] = (fast, marks, opened, work, on_cpu, known, updates)
    with drawn_alike(model), without_trace(model), numbers_put_back(model), ExitStack() as stack:
        stack.enter_context(compiled_calls_noted(model))
        tables = stack.enter_context(functions_for_meta(device.kind, work))
        for context in watching:
            stack.enter_context(context)

        def take() -> None:
            with without_dispatch_modes():
                draws.rewind()
            for release in releases_of(model):
                release.begin_step()
            gradients[:] = run_step(model, replace(step, batch=twins), optimize, marks)
            ends.append(len(marks.found))

        steps = steps_until_quiet(take, model, opened, tables, quiet)
        weights += stored_bytes(t for t in tensors_beside(model) if opened.number_of(t) is None)
    seconds.extend([0.0] * (len(marks.found) - len(seconds)))
    end = ends[steps.highest]  # after which there are steps that need less
    changes, found = changes_of(opened, marks.found, end)
    trace = Trace(changes, found, received, seconds[:end], marks.names, gradients, weights, state)
    return StepsTaken(trace, steps, seen, named.chose_by_chance, known.asked)


def _known_values(model: nn.Module, step: TrainingStep, twins: Any) -> KnownValues:
    """What a model may look at: of its batch, and its own numbers, such as how many batches there were."""
    numbers = [(t, data_behind(t)) for t in model.buffers() if t.dim() == 0]
    values = [*tensors_with_values(step.batch, twins), *((t, n) for t, n in numbers if not n.is_meta)]
    return KnownValues(values, step.kind == "cpu")


def _bytes_of_step(optimizer: Any) -> int:
    """Bytes that a step in one kernel moves: it reads and writes parameters and state, and reads gradients."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return 3 * sum(p.nbytes for p in trained) + 2 * stored_bytes(tree_leaves([optimizer.state.get(p) for p in trained]))
