"""Checks by looking: what checkpointing can save at all, by the predicted memory of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from ckptfused.doctor.findings import Finding
from ckptfused.doctor.look import Look
from ckptfused.doctor.saving import everything_saved
from ckptfused.profiler.api import profiled
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import adamw, has_vocabulary
from ckptfused.simulate.devices import Device, device_named
from ckptfused.sizes import counted, size

SHARE = 0.4
"""The part of the peak below which other means save more than checkpointing can."""
_LESS_STATE = "sharding (FSDP2), LoRA, or an optimizer with a smaller state"
COSTS = 1.05
"""The peak without checkpointing over the one with it, below which it does not pay."""


def memory_of_the_step(look: Look) -> Iterator[Finding]:
    """Where activations are not what fills the memory, or checkpointing them saves next to nothing."""
    if not isinstance(look.step.batch, Mapping) or not look.trained:
        return
    found = predicted_profiles(look)
    if found is None:
        return
    configured, saving = found
    activations = configured.activations + configured.transients
    if activations < SHARE * configured.peak:
        yield _other_means(look.model, configured, activations)
    if look.checkpoints and saving.peak < COSTS * configured.peak:
        length = "" if look.length is None else f" of {counted(look.length, 'token')}"
        yield Finding(
            "advice",
            "the model",
            f"with sequences{length} checkpointing only costs time: the predicted peak is {size(configured.peak, 1)}, "
            f"and {size(saving.peak, 1)} where everything is saved{_caveats(configured, saving)}",
            "switch it off, or train with longer sequences or larger batches",
        )


def _other_means(model: nn.Module, memory: Profile, activations: int) -> Finding:
    state = memory.weights + memory.optimizer + memory.gradients
    adapted = 2 * memory.all_gradients < memory.weights  # of most weights there is neither gradient nor state
    less = "sharding (FSDP2), or frozen weights in fewer bits" if adapted else _LESS_STATE
    chunked = 'ckptfused.convert(model, loss="chunked"), or ckptfused.linear_cross_entropy'
    parts = [
        (state, "weights, gradients and optimizer", less),
        (memory.loss_head, "loss head", chunked if has_vocabulary(model) else "a smaller batch"),
    ]
    (most, place, _), *_ = parts = sorted(parts, reverse=True)
    what = "; ".join(mend for held, _, mend in parts if 2 * held > most)
    return Finding(
        "advice",
        "the model",
        f"activations are {activations / memory.peak:.0%} of the predicted peak of {size(memory.peak, 1)}, at "
        f"{memory.moment}; most of the rest is {place} (state {size(state, 1)}, loss head {size(memory.loss_head, 1)})"
        f"{_caveats(memory)}",
        what,
    )


def _caveats(*steps: Profile) -> str:
    """The notes of predictions, such as what was measured on this machine rather than counted."""
    return "".join(f"; {note}" for note in dict.fromkeys(note for step in steps for note in step.notes))


def predicted_profiles(look: Look) -> tuple[Profile, Profile] | None:
    """A step as configured and one that saves everything; None where that cannot be predicted, or not all of it."""
    batch, given = look.step.batch, look.step
    assert isinstance(batch, Mapping)
    device = given.device if isinstance(given.device, Device) else device_named(given.device)
    given = replace(given, device=device, optimizer=given.optimizer or adamw)
    unmasked = {name: value for name, value in batch.items() if name != "attention_mask"}
    for step in (given, replace(given, batch=unmasked)):  # what looks into a mask cannot run without values
        with contextlib.suppress(ValueError):  # not every model runs on the meta device
            configured = profiled(look.model, step)
            with everything_saved(look.model):
                saving = profiled(look.model, step)
            return None if configured.uncounted or saving.uncounted else (configured, saving)
    return None
