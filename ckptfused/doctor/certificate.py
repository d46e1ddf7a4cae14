"""The proof: a step as configured against one that saves everything, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckptfused.doctor.causes import Cause, cause_of
from ckptfused.doctor.comparison import OUT_OF_MEMORY, Compared, Name, grouped, unlike
from ckptfused.doctor.findings import Finding
from ckptfused.doctor.ranks import everyones, joined, rank
from ckptfused.doctor.saving import Share, everything_saved, fused, units
from ckptfused.doctor.steps import StepRun, eager, run_as_is
from ckptfused.profiler.step import TrainingStep
from ckptfused.state.snapshot import Unchanged

MOST_PARTS = 8
"""Into how many a step that saves everything is divided where it does not fit."""


def certify(model: nn.Module, step: TrainingStep, name: Name) -> tuple[list[Finding], str]:
    """What a step proves: findings, and the certificate's text.

    At most three steps: as configured; saving everything; and where these differ for a reason that is not certain, as
    configured once more, which tells a wrong replay from operations that are not deterministic. Where everything does
    not fit, a half of it is saved at a time, or less, down to an eighth, in as many steps. The model and all generators
    are afterwards as before.
    **Raises** what the model raises where it fails without any checkpointing, too.
    """
    with torch.inference_mode(False), Unchanged(model, hooks=False) as unchanged, eager():
        configured = run_as_is(model, step.batch, sizes=not (exact := _exact(model)))
        unchanged.restore()
        regions = [region for region in configured.recorder.regions if not region.foreign]
        causes = grouped(filter(None, (cause_of(region, name, unchanged.written) for region in regions)))
        reference, parts = _reference(model, step.batch, configured, unchanged)
        again, everyone = None, everyones(causes)
        if _in_doubt(configured, reference, causes):
            unchanged.restore()
            again = run_as_is(model, step.batch, configured)
    compared = Compared(name, causes, configured, reference, again)
    compared.parts, compared.fused, compared.exact = parts, fused(model), exact
    compared.elsewhere = [
        replace(cause, text=f"on rank {i}, {cause.text}")
        for i, theirs in enumerate(everyone)
        for cause in theirs
        if i != rank()
    ]
    return compared.findings(), compared.text()


def _in_doubt(configured: StepRun, reference: StepRun, causes: list[Cause]) -> bool:
    """Whether a third step could say more: on some rank steps differ, none failed, and no rank is certain why."""
    complete = reference.error is None and configured.error is None
    differ = complete and unlike(configured, reference)
    ranks = everyones((complete, differ, any(cause.certain for cause in causes)))
    return all(r[0] for r in ranks) and any(r[1] for r in ranks) and not any(r[2] for r in ranks)


def _reference(model: nn.Module, batch: Any, configured: StepRun, unchanged: Unchanged) -> tuple[StepRun, int]:
    """A step that saves everything, or, in so many parts as it has to be for memory's sake, the first one that differs
    from the step as configured.

    One that saves a part, and has the gradients of the step as configured, says that the replays of that part are
    right; so all of them together say what a step that saves everything does.
    """
    calls, parts = len(configured.recorder.regions), 1
    most = min(MOST_PARTS, max(calls, units(model), 1))
    while True:
        for number in range(parts):
            unchanged.restore()
            with everything_saved(model, Share(number, parts, calls)):
                found = run_as_is(model, batch, configured, guarded=not joined())
            if found.error is not None or unlike(configured, found):
                break
        if not isinstance(found.error, OUT_OF_MEMORY) or parts == most or joined():
            return found, parts
        parts = min(2 * parts, most)


def _exact(model: nn.Module) -> bool:
    """Whether equal operations have equal bits."""
    return torch.are_deterministic_algorithms_enabled() or all(p.is_cpu for p in model.parameters())
