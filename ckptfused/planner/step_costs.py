"""What each layer of a model costs in each of its modes, found by predicting a few steps.

Layers of one kind cost the same: in each step they run in as many modes as there are layers of the kind, so that the
steps that are predicted do not grow in number with the depth of a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf

from ckptfused.models.install import install
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.planner.frontier import Unit
from ckptfused.planner.modes import HeadMode, Layer, ModeCosts
from ckptfused.planner.predicted_steps import UNSEEN, PredictedSteps, unseen_bytes
from ckptfused.profiler.result import Profile

SCRATCHES = (64 << 20, 16 << 30)
"""Limits of an FFN's scratch that are tried beside the device's own."""
CHUNKED_SCRATCHES = (None, 64 << 20)
"""Scratch limits that are tried for a chunked loss."""


@dataclass(frozen=True)
class Costs:
    """Costs of a whole step. Bytes and seconds outside of layers and head are the same for all plans."""

    layers: tuple[Layer, ...]
    heads: tuple[HeadMode, ...]
    head: Unit
    state: int
    """Weights, the batch, what the optimizer keeps and a step leaves to the next, and gradients that add up."""
    embeddings: int
    """The most in the backward of what runs before the layers, beside their gradients, whatever the head's mode."""
    constant: int
    """What is held beside the layers' own, from forward to backward."""
    workspaces: tuple[int, ...]
    """The most that a product may allocate within itself, by the mode of the head."""
    least: int
    """The least that a step needs whatever the plan: that of the optimizer's step."""
    rest_seconds: float
    """Seconds of each batch outside of layers and head."""
    base: Profile
    """The profile of the model with all layers in the mode `"inputs"`."""
    host_memory: float
    """Bytes that inputs of layers may take on the host."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*(layer.unit for layer in self.layers), self.head)

    def apart(self) -> list[Costs]:
        """The same, of the modes of the head with one workspace each: of two plans, one that needs less beside it may
        need more with it."""
        groups = defaultdict(list)
        for place, workspace in enumerate(self.workspaces):
            groups[workspace].append(place)
        return [
            replace(
                self,
                heads=tuple(self.heads[place] for place in places),
                head=self.head._replace(modes=tuple(self.head.modes[place] for place in places)),
                workspaces=(workspace,) * len(places),
            )
            for workspace, places in groups.items()
        ]

    def peak(self, above: int, head: int = 0) -> int:
        """Peak bytes of a step whose layers and head, in this mode of its, need so much."""
        own = max(self.constant + above, self.embeddings + sum(unit.gradients for unit in self.units))
        return max(self.state + own + unseen_bytes(own, self.workspaces[head], self.base.device), self.least)

    def seconds(self, own: float) -> float:
        """Seconds of a step whose layers and head take so much for a batch."""
        base = self.base
        return base.gradient_accumulation_steps * (self.rest_seconds + own) + base.optimizer_seconds

    def policy(self, chosen: Iterable[int]) -> CheckpointPolicy:
        """The policy that has these modes of layers and head, by index."""
        *modes, head = chosen
        found = (layer.modes[mode] for layer, mode in zip(self.layers, modes, strict=True))
        return CheckpointPolicy.per_layer(filter(None, found), **self.heads[head].options)

    def indices(self, policy: CheckpointPolicy) -> tuple[int, ...] | None:
        """The inverse; None where one of its modes was not counted."""
        own = [layer.modes for layer in self.layers if layer.modes != (None,)]
        wanted = iter(policy.modes(len(own)))
        head = HeadMode(policy.loss, policy.loss_scratch)
        try:
            found = (0 if layer.modes == (None,) else layer.modes.index(next(wanted)) for layer in self.layers)
            return None if policy.is_divided else (*found, self.heads.index(head))
        except ValueError:
            return None


def costs(steps: PredictedSteps, host_memory: float = inf) -> Costs:
    """Predicts as many steps as are needed, and says what everything costs. host_memory: bytes for inputs of layers."""
    installed = install(steps.meta_copy, CheckpointPolicy.uniform())
    base = steps.of(CheckpointPolicy.uniform(), whole=True)
    chunked = install(steps.meta_copy, CheckpointPolicy.uniform(loss="chunked")).heads
    heads = [HeadMode()]
    if any(head.path == "chunked" for head in chunked):
        heads += [HeadMode("chunked", scratch) for scratch in CHUNKED_SCRATCHES]
    table = ModeCosts(steps, installed.layers, base)
    found = zip_longest(heads[1:], SCRATCHES)
    differ = [scratch for head, scratch in found if table.differs(head or heads[-1], scratch)]
    table.read((None, *filter(None, differ)))
    own, at_end = base.weights + base.optimizer + base.left, base.all_gradients + base.optimizer_transient
    at_end += at_end // UNSEEN if steps.device.kind == "cpu" else 0
    batch_seconds = base.forward_seconds + base.backward_seconds
    spent = sum(cost.forward_seconds + cost.backward_seconds for cost in table.kept)
    return Costs(
        layers=table.layers(host_memory),
        heads=tuple(heads),
        head=table.head(heads),
        state=own + base.accumulated,
        embeddings=table.embeddings,
        constant=table.constant,
        workspaces=table.workspaces(heads),
        least=max(own + at_end, 0 if base.layers else base.peak),
        rest_seconds=batch_seconds - spent,
        base=base,
        host_memory=host_memory,
    )
