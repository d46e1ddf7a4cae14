"""A step predicted: it runs on meta tensors with an open ledger (`cost.OpenLedger`), so that nothing is computed.

The ledger sees every storage of the meta device begin and end, PyTorch's and ckptfused's alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptfused._extension import _C
from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import without_dispatch_modes
from ckptfused.cost import OpenLedger
from ckptfused.models.describe.own_forward import stored_bytes
from ckptfused.models.release import released, releases_of
from ckptfused.profiler.analysis import profile_of
from ckptfused.profiler.left_behind import MOST_GROWTH, QUIET, Quieted, numbers_put_back, steps_until_quiet
from ckptfused.profiler.marks import Marks
from ckptfused.profiler.optimizer_step import first_line, state_tensors, step_of, take_step
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, NoLossError, TrainingStep, misspelt, run_step
from ckptfused.profiler.trace import Trace, changes_of
from ckptfused.simulate.autocast import outside
from ckptfused.simulate.devices import Device
from ckptfused.simulate.fast_path import measured_fast_paths
from ckptfused.simulate.functions import functions_for_meta
from ckptfused.simulate.made_by_name import MadeByName
from ckptfused.simulate.meta_copy import (
    batch_bytes,
    copy_to_meta,
    data_behind,
    model_tensors,
    tensors_beside,
    without_data,
)
from ckptfused.simulate.roofline import TooLargeError, Work
from ckptfused.simulate.unseen import compiled_calls_noted, unseen
from ckptfused.simulate.values import LARGEST, KnownValues, tensors_with_values
from ckptfused.sizes import size
from ckptfused.state.snapshot import drawn_alike, rng_states
from ckptfused.state.undone import without_trace


@contextmanager
def simulated(model: nn.Module, step: TrainingStep) -> Iterator[tuple[nn.Module, TrainingStep]]:
    """A copy of a model without its data, the step with an optimizer of the copy's, and no autocast around both."""
    meta_copy, keeper = copy_to_meta(model, step.optimizer if isinstance(step.optimizer, Optimizer) else None)
    meta_copy.zero_grad(set_to_none=True)
    with outside(step.kind):
        yield meta_copy, replace(step, optimizer=keeper or step.optimizer_of(meta_copy))


def predicted(model: nn.Module, step: TrainingStep, quiet: int = QUIET) -> Profile:
    """The profile of a step of a model and an optimizer on the meta device, of which the optimizer is changed. Of the
    batch, on any device, what small tensors hold counts where the model looks at it. quiet: steps in a row that leave
    nothing more behind and need no more; the one of all that needs the most counts.

    **Raises** `ValueError` where the model does not run without data, outside of its layers.
    """
    batch, device, optimizer = step.batch, step.device, step.optimizer_of(model)
    assert isinstance(device, Device)
    sparse = any(getattr(m, "sparse", False) is True for m in model.modules())
    notes, at_once, counts = ([], False, True) if optimizer is None else take_step(optimizer, device.kind, sparse)
    left_out = [] if counts else [*notes]
    opaque: dict[int, str] = {}
    while True:
        opened = OpenLedger(device.kind)
        marks = Marks(model, opened.__len__)
        work = Work(device, opened)
        try:
            with drawn_alike(model), without_trace(model), numbers_put_back(model):
                trace, by_chance, steps = _record(
                    model, replace(step, optimizer=optimizer), at_once, opened, marks, work, quiet
                )
            break
        except NoLossError as error:
            if not opaque:
                raise
            raise ValueError(f"model: expected one that runs on the meta device, got {'; '.join(notes)}") from error
        except TooLargeError:
            raise
        except Exception as error:
            is_wrong = _is_wrong(error) and not work.selects
            if marks.failed is None or marks.failed in opaque or is_wrong:
                expected = "takes this batch" if is_wrong else "runs on the meta device"
                hint = misspelt(model, batch) or _hint(batch, error)
                why = f"{first_line(error)}{hint}"
                if opaque and not is_wrong:  # perhaps what a layer that was left out would have left behind
                    why += f"; {next(iter(opaque.values()))}"
                raise ValueError(f"model: expected one that {expected}, got {why}") from error
            name, layer = marks.layers[marks.failed]
            why = f"layer {name} ({type(layer).__name__}) is opaque: it does not run without data ({first_line(error)})"
            opaque[marks.failed] = why
            notes.append(why)
            layer.forward = _Opaque()
        finally:
            model.zero_grad(set_to_none=True)
    notes += _not_looked_at(batch)
    recurrent = [name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    if recurrent and device.kind == "cuda":
        notes.append(f"{', '.join(recurrent)}: what cuDNN keeps within a recurrent layer is not counted")
    notes += _measured(work)
    notes += [_CHANCE] * by_chance
    over = [_SPARSE] if step.gradient_accumulation_steps > 2 and sparse else []
    (left_out if max(steps.grown, steps.risen) > MOST_GROWTH * trace.weights else notes).extend(steps.said())
    left_out += [*unseen(model, batch), *opaque.values(), *over]
    return profile_of(
        trace,
        device.name,
        "predicted",
        step,
        notes=tuple(dict.fromkeys([*notes, *left_out])),
        uncounted=next(iter(left_out), ""),
        varied=steps.varied,
        time_error=device.time_error,
        host=opened.host.most,
        workspace=_workspace(opened, work.half_multiplications) if device.kind == "cpu" else 0,
    )


_CHANCE = "the model looks at random numbers (drops layers, say): another step may need more, or less"
_SPARSE = "sparse gradients count as those of two batches: each further batch adds its rows to them"
_HALF_WORKSPACES = ((1 << 24, 416 << 10), (1 << 26, 704 << 10), (1 << 62, 1728 << 10))
"""Bytes that oneDNN's products in half precision allocate within themselves, a thread, by their multiplications: the
most that was measured of 8,569 random shapes and layouts, rounded up. Attention's own take less than the least."""


def _workspace(opened: OpenLedger, half: int) -> int:
    """Workspace bytes of the largest product. half: multiplications of the largest one in half precision, or 0."""
    found = [(event[4], event[3]) for event in opened.ledger.events if event[0] == "product"]
    sizes = [(kind in ("BFloat16", "Half"), rows * columns * depth) for kind, (rows, columns, depth, *_) in found]
    half = max([half, *(size for narrow, size in sizes if narrow)])
    each = next(most for limit, most in _HALF_WORKSPACES if half <= limit) if half else 0
    return max(_C.onednn_workspace(max((size for _, size in sizes), default=0)), each * torch.get_num_threads())


def _record(
    model: nn.Module, step: TrainingStep, at_once: bool, opened: OpenLedger, marks: Marks[int], work: Work, quiet: int
) -> tuple[Trace, bool, Quieted]:
    """The trace of a predicted step, whether the model chose by chance what to do, and what it and those beside it came
    to. work: is told of its ops.

    at_once: whether the optimizer's step is one kernel that allocates nothing.
    """
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

    def step_at_once() -> None:  # reads and writes parameters and state, and reads gradients
        assert optimizer is not None
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        held = stored_bytes(tree_leaves([optimizer.state.get(p) for p in trained]))
        spend((3 * sum(p.nbytes for p in trained) + 2 * held) / device.copy)

    work.spend, device = spend, work.device
    marks.received, marks.stamp = given, now
    twins, optimizer = without_data(step.batch), step.optimizer_of(model)
    weights = stored_bytes(model_tensors(model)) + batch_bytes(step.batch)
    state = 0 if optimizer is None else stored_bytes(state_tensors(optimizer))
    optimize = None if optimizer is None else step_at_once if at_once else step_of(optimizer)
    updates = released(model, optimizer if step.release else None, optimize)
    numbers = [(t, data_behind(t)) for t in model.buffers() if t.dim() == 0]  # such as how many batches there were
    values = [*tensors_with_values(step.batch, twins), *((t, n) for t, n in numbers if not n.is_meta)]
    known = KnownValues(values, device.kind == "cpu")
    named = MadeByName()
    on_cpu = named if device.kind == "cpu" else nullcontext()
    fast = measured_fast_paths(model, work)
    draws = rng_states(model)
    functions, compiled = functions_for_meta(device.kind, work), compiled_calls_noted(model)
    with compiled, functions as tables, fast, marks, opened, work, on_cpu, known, updates:

        def take() -> None:
            with without_dispatch_modes():
                draws.rewind()
            for release in releases_of(model):
                release.begin_step()
            gradients[:] = run_step(model, replace(step, batch=twins), optimize, marks)
            ends.append(len(marks.found))

        steps = steps_until_quiet(take, opened, tables, quiet)
        weights += stored_bytes(t for t in tensors_beside(model) if opened.number_of(t) is None)
    seconds.extend([0.0] * (len(marks.found) - len(seconds)))
    end = ends[steps.highest]  # after which there are steps that need less
    changes, found = changes_of(opened, marks.found, end)
    trace = Trace(changes, found, received, seconds[:end], marks.names, gradients, weights, state)
    return trace, named.chose_by_chance, steps


def _measured(work: Work) -> list[str]:
    """What to say of memory that ops hold within themselves."""
    notes = []
    if work.convolution_scratch:
        held = f"up to {size(work.convolution_scratch)} within one, as measured on this CPU"
        notes.append(f"convolutions hold {held}")
    if work.selects:
        notes.append("what the model selects by values (x[mask], nonzero) counts as all that there is to select from")
    if work.unmeasured:
        named = ", ".join(sorted(work.unmeasured))
        notes.append(f"{named}: too large to run alone, so what PyTorch allocates within it is not counted")
    return notes


def _is_wrong(error: Exception) -> bool:
    """Whether a layer would fail with data, too: of a batch or a model whose parts do not fit together."""
    text = str(error)
    if "meta" in text.lower():
        return False
    return bool(re.search(r"\b(shapes?|sizes?|dim|dimensions?)\b", text)) or (
        isinstance(error, TypeError) and "argument" in text
    )


def _unknown(batch: Batch) -> list[str]:
    """Masks, positions and the like whose values are not there, or too many to look at."""
    named = ((name, t) for name, t in batch.items() if isinstance(t, Tensor)) if isinstance(batch, Mapping) else ()
    found = [name for name, t in named if not t.is_floating_point() and (t.is_meta or t.numel() > LARGEST)]
    return [name for name in found if name not in ("input_ids", "labels")]


def _not_looked_at(batch: Batch) -> list[str]:
    names = ", ".join(_unknown(batch))
    said = f"{names} without data, or above {LARGEST:,} entries"
    said += ": what the model chooses by their values is as if they were not"
    return [said] if names else []


def _hint(batch: Batch, error: Exception) -> str:
    """What to do where a model asks for values that the batch could have given."""
    if torch.is_anomaly_enabled():
        return ". Anomaly detection looks at every gradient: predict without it"
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    if "meta" in str(error) and any(t.numel() > LARGEST for t in tensors):
        return f". It looks at values, which are not read of more than {LARGEST:,} entries: predict fewer sequences"
    if "meta" not in str(error) or not any(t.is_meta for t in tensors):
        return ""
    names = ", ".join(_unknown(batch)) or "the batch"
    return f". It looks at values: give {names} with data, on the CPU, say; the model may stay on the meta device"


class _Opaque:
    """A stand-in for a forward that does not run without data: its result is as large as its input."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()).clone()
