"""A step predicted: it runs on meta tensors with an open ledger (`cost.OpenLedger`), so that nothing is computed.

The ledger sees every storage of the meta device begin and end, PyTorch's and ckptfused's alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptfused._extension import _C
from ckptfused.compat.pytree import tree_leaves
from ckptfused.cost import OpenLedger
from ckptfused.profiler.analysis import profile_of
from ckptfused.profiler.left_behind import MOST_GROWTH, QUIET
from ckptfused.profiler.optimizer_step import first_line, take_step
from ckptfused.profiler.predicted_step import Watchers, steps_taken
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, NoLossError, TrainingStep, misspelt
from ckptfused.simulate.autocast import outside
from ckptfused.simulate.devices import Device
from ckptfused.simulate.meta_copy import copy_to_meta
from ckptfused.simulate.roofline import TooLargeError, Work
from ckptfused.simulate.unseen import unseen
from ckptfused.simulate.values import LARGEST
from ckptfused.sizes import size


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
        seen = Watchers.of(model, device)
        marks, work = seen.marks, seen.work
        try:
            found = steps_taken(model, replace(step, optimizer=optimizer), at_once, seen, quiet)
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
    trace, steps, (opened, _, work) = found.trace, found.steps, found.seen
    notes += _not_looked_at(batch)
    recurrent = [name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    if recurrent and device.kind == "cuda":
        notes.append(f"{', '.join(recurrent)}: what cuDNN keeps within a recurrent layer is not counted")
    notes += _measured(work)
    notes += [_CHANCE] * found.by_chance
    notes += steps.counted()
    over = [_SPARSE] if step.gradient_accumulation_steps > 2 and sparse else []
    (left_out if max(steps.grown, steps.risen) > MOST_GROWTH * trace.weights else notes).extend(steps.said())
    left_out += [*unseen(model, batch), *opaque.values(), *over, *[_ASKED] * found.asked]
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
_ASKED = "the model asks for a number (`.item()`) that a prediction does not know, and catches the error"
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
