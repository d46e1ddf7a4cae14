"""Predicted steps of one model under policies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ckptfused.models.install import install
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.profiler.left_behind import QUIET
from ckptfused.profiler.predict import predicted
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import TrainingStep
from ckptfused.simulate.devices import Device

UNSEEN = 100
"""One part in so many of a step's bytes on the CPU, weights aside, is left for what ops allocate within themselves,
which a step on meta tensors does not show (docs/memory.md)."""


class PredictedSteps:
    """Predicted steps of one model under policies. The model is a copy without data, which they change."""

    def __init__(self, meta_copy: nn.Module, step: TrainingStep, said: Callable[[str], None]) -> None:
        self.meta_copy, self.step = meta_copy, step
        assert isinstance(step.device, Device)
        self.device = step.device
        self._said = said
        self._found: dict[CheckpointPolicy, Profile] = {}
        self._varies = False
        """Whether a step, perhaps not the first one, leaves something to the next, or needs more than another."""
        self.broken: set[CheckpointPolicy] = set()
        """Policies whose segments do not stay whole in this model."""

    def of(self, policy: CheckpointPolicy, whole: bool = False) -> Profile:
        """The step's profile. whole: with its optimizer, which changes nothing but what is added for it, if it does not
        update weights in backward. **Raises** `ValueError` where a layer or the optimizer cannot be counted."""
        if policy not in self._found or whole:
            self._said(str(policy))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                install(self.meta_copy, policy)
                step = self.step if whole or self.step.release else replace(self.step, optimizer=None)
                found = predicted(self.meta_copy, step, QUIET if whole or self._varies else 1)
            self._varies |= found.left > 0 or found.varied
            if found.uncounted:
                raise ValueError(
                    f"model: no plan keeps a budget where {found.uncounted}; profile(model, batch) measures it"
                )
            if any("is divided before" in str(warning.message) for warning in said):
                self.broken.add(policy)
            more = unseen_bytes(found.above_state, found.workspace, found.device)
            self._found[policy] = replace(found, peak=found.peak + more, transients=found.transients + more)
        return self._found[policy]


def unseen_bytes(above_state: int, workspace: int, device: str) -> int:
    """Bytes to leave free beside what a step was counted to need above its state."""
    return workspace + above_state // UNSEEN if device == "cpu" else 0
