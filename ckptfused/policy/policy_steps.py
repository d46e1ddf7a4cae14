"""Predicted steps of one model under policies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfused.convert.apply import apply
from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.policy.devices import Device
from ckptfused.policy.predict import predicted
from ckptfused.policy.result import Profile
from ckptfused.policy.step import Batch

UNSEEN = 100
"""Of what a step on the CPU needs beside weights, this part is left for what ops allocate within themselves, which a
step on meta tensors does not show (docs/memory.md)."""


class Steps:
    """Predicted steps of one model under policies. The model is a copy without data, which they change."""

    def __init__(
        self,
        twin: nn.Module,
        batch: Batch,
        device: Device,
        said: Callable[[str], None],
        autocast: torch.dtype | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        self.twin = twin
        self.device = device
        self._options = autocast, gradient_accumulation_steps
        self._batch = batch
        self._said = said
        self._found: dict[CheckpointPolicy, Profile] = {}
        self.broken: set[CheckpointPolicy] = set()
        """Of which segments do not stay whole in this model."""

    def of(self, policy: CheckpointPolicy, optimizer: Optimizer | None = None) -> Profile:
        """The step's profile. An optimizer changes nothing but what is added for it: see `whole`."""
        if policy not in self._found or optimizer is not None:
            self._said(str(policy))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                apply(self.twin, policy)
                found = predicted(self.twin, self._batch, optimizer, self.device, *self._options)
            if any("is divided before" in str(warning.message) for warning in said):
                self.broken.add(policy)
            more = unseen(found.above_state, found.workspace, found.device)
            self._found[policy] = replace(found, peak=found.peak + more, transients=found.transients + more)
        return self._found[policy]


def unseen(above_state: int, workspace: int, device: str) -> int:
    """Beside what a step was counted to need above its state."""
    return workspace + above_state // UNSEEN if device == "cpu" else 0
