"""What each layer of a model costs in each of its modes, found by predicting a few steps.

Layers of one kind cost the same: in each step they run in as many modes as there are layers of the kind, so that the
steps that are predicted do not grow in number with the depth of a model.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfused.convert import find
from ckptfused.convert.apply import apply
from ckptfused.convert.layer_mode import LayerMode
from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.convert.report import Report
from ckptfused.policy import chain
from ckptfused.policy.chain import Passing, Unit
from ckptfused.policy.devices import Device
from ckptfused.policy.layer_costs import Cost, embeddings_of, held_beside, measured
from ckptfused.policy.predict import predicted
from ckptfused.policy.result import Profile
from ckptfused.policy.step import Batch
from ckptfused.spec.keep import KEEP_PRESETS

AS_IT_WAS = LayerMode(None)
SCRATCHES = (64 << 20, 16 << 30)
"""Limits of an FFN's scratch that are tried beside the device's own."""
CHUNKED_SCRATCHES = (None, 64 << 20)
"""Of a chunked loss."""


UNSEEN = 100
"""Of what a step on the CPU needs beside weights, this part is left for what ops allocate within themselves, which a
step on meta tensors does not show (docs/memory.md)."""


class HeadMode(NamedTuple):
    """How the loss is made."""

    loss: str | None = None
    scratch: int | None = None


class Layer(NamedTuple):
    """A layer and its modes, in the order in which they are preferred where they cost the same."""

    name: str
    modes: tuple[LayerMode | None, ...]
    """Of a module of ckptfused's own, which no policy changes, None alone."""
    unit: Unit


@dataclass(frozen=True)
class Costs:
    """Of a whole step. Bytes and seconds outside of layers and head are the same for all plans."""

    layers: tuple[Layer, ...]
    heads: tuple[HeadMode, ...]
    head: Unit
    state: int
    """Weights, the batch, what the optimizer keeps, and gradients that are accumulated."""
    embeddings: int
    """The most in the backward of what runs before the layers, beside their gradients, whatever the head's mode."""
    constant: int
    """What is held beside the layers' own, from forward to backward."""
    workspace: int
    """The most that a product may allocate within itself."""
    least: int
    """The least that a step needs whatever the plan: that of the optimizer's step."""
    rest_seconds: float
    """Of each batch."""
    base: Profile
    """Of the model with all layers in the mode `"inputs"`."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*(layer.unit for layer in self.layers), self.head)

    def peak(self, above: int) -> int:
        """Of a step of which layers and head need so much."""
        own = max(self.constant + above, self.embeddings + sum(unit.gradients for unit in self.units))
        return max(self.state + own + _unseen(own, self.workspace, self.base.device), self.least)

    def seconds(self, own: float) -> float:
        """Of a step of which layers and head take so much for a batch."""
        base = self.base
        return base.gradient_accumulation_steps * (self.rest_seconds + own) + base.optimizer_seconds

    def policy(self, chosen: Iterable[int]) -> CheckpointPolicy:
        """Of the modes of layers and head, by index."""
        *modes, head = chosen
        found = (layer.modes[mode] for layer, mode in zip(self.layers, modes, strict=True))
        return CheckpointPolicy.per_layer(filter(None, found), **_loss(self.heads[head]))

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
            unseen = _unseen(found.above_state, found.workspace, found.device)
            self._found[policy] = replace(found, peak=found.peak + unseen, transients=found.transients + unseen)
        return self._found[policy]


def _unseen(above_state: int, workspace: int, device: str) -> int:
    """Beside what a step was counted to need above its state."""
    return workspace + above_state // UNSEEN if device == "cpu" else 0


def costs(steps: Steps, optimizer: Optimizer | None) -> Costs:
    """Predicts as many steps as are needed, and says what everything costs."""
    report = apply(steps.twin, CheckpointPolicy.uniform())
    base = steps.of(CheckpointPolicy.uniform(), optimizer)
    chunked = apply(steps.twin, CheckpointPolicy.uniform(loss="chunked")).heads
    heads = [HeadMode()]
    if any(head.path == "chunked" for head in chunked):
        heads += [HeadMode("chunked", scratch) for scratch in CHUNKED_SCRATCHES]
    table = _Table(steps, report, base)
    found = zip_longest(heads[1:], SCRATCHES)
    differ = [scratch for head, scratch in found if table.differs(head or heads[-1], scratch)]
    table.read((None, *filter(None, differ)))
    own, at_end = base.weights + base.optimizer, base.all_gradients + base.optimizer_transient
    at_end += at_end // UNSEEN if steps.device.kind == "cpu" else 0
    batch_seconds = base.forward_seconds + base.backward_seconds
    spent = sum(cost.forward_seconds + cost.backward_seconds for cost in table.kept)
    return Costs(
        layers=table.layers(),
        heads=tuple(heads),
        head=Unit(tuple(table.heads[head].mode() for head in heads)),
        state=own + base.accumulated,
        embeddings=table.embeddings,
        constant=table.constant,
        workspace=table.workspace,
        least=max(own + at_end, 0 if base.layers else base.peak),
        rest_seconds=batch_seconds - spent,
        base=base,
    )


class _Table:
    """What is known of each layer's modes."""

    def __init__(self, steps: Steps, report: Report, base: Profile) -> None:
        self._steps = steps
        self._base = base
        self._described = {layer.name: layer for layer in report.layers}
        self.kept = measured(base)
        """Of all layers and the head, all in the mode `"inputs"`."""
        self.constant, self.embeddings, self.workspace = held_beside(base), embeddings_of(base), base.workspace
        self.heads = {HeadMode(): self.kept[-1]}
        self._names = [layer.name for layer in base.layers]
        self._places = [place for place, name in enumerate(self._names) if name in self._described]
        self._modes: list[tuple[LayerMode, ...]] = []
        self._kinds = self._kinds_of(report)
        self._known: dict[tuple[int, LayerMode], tuple[int, Cost]] = {}

    def _measured(self, policy: CheckpointPolicy) -> list[Cost]:
        profile = self._steps.of(policy)
        self.constant = max(self.constant, held_beside(profile))
        self.embeddings = min(self.embeddings, embeddings_of(profile))
        self.workspace = max(self.workspace, profile.workspace)
        return measured(profile)

    def differs(self, head: HeadMode, scratch: int | None) -> bool:
        """Whether a limit changes what any layer costs; and what a head costs."""
        *found, self.heads[head] = self._measured(CheckpointPolicy.uniform(scratch=scratch, **_loss(head)))
        return found != self.kept[:-1]

    def _kinds_of(self, report: Report) -> dict[int, int]:
        """Which layers are alike, by numbers."""
        known: dict[Any, int] = {}
        modules = {name: layer for name, layer, _ in find.layers(self._steps.twin)}
        kinds = {}
        for place in self._places:
            layer, described = modules[self._names[place]], self._described[self._names[place]]
            parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in layer.parameters())
            facts = type(layer), parameters, described.path, described.reason, described.before
            kinds[place] = known.setdefault(facts, len(known))
        return kinds

    def _modes_of(self, place: int, limits: Iterable[int | None]) -> tuple[LayerMode, ...]:
        if self._described[self._names[place]].path not in ("fused", "part"):
            return (LayerMode(), AS_IT_WAS)
        return (*(LayerMode(keep, scratch) for scratch in limits for keep in KEEP_PRESETS), AS_IT_WAS)

    def read(self, limits: tuple[int | None, ...]) -> None:
        """Predicts steps in which one layer of each kind has each of its modes once.

        The ends of a stack come last, where a layer may cost what others of its kind do not.
        """
        members: defaultdict[int, list[int]] = defaultdict(list)
        for place, kind in self._kinds.items():
            members[kind].append(place)
        self._limits = limits
        runs: defaultdict[int, dict[int, LayerMode]] = defaultdict(dict)
        for own in members.values():
            inner = [*own[1:-1], *own[-1:], *own[:1]] if len(own) > 1 else own
            for index, mode in enumerate(self._modes_of(own[0], limits)):
                runs[index // len(inner)][inner[index % len(inner)]] = mode
        order = {name: index for index, name in enumerate(self._described)}
        for run in runs.values():
            modes = [LayerMode()] * len(order)
            for place, mode in run.items():
                modes[order[self._names[place]]] = mode
            found = self._measured(CheckpointPolicy.per_layer(modes))
            for place, mode in run.items():
                self._known[self._kinds[place], mode] = place, found[place]

    def layers(self) -> tuple[Layer, ...]:
        """All layers, with offload where it is possible."""
        inputs = self._inputs()
        found = []
        for place, (name, cost, profile) in enumerate(zip(self._names, self.kept, self._base.layers, strict=False)):
            own: list[tuple[LayerMode | None, chain.Mode]] = [(None, cost.mode())]
            if place in self._kinds:
                costs = {mode: self._cost(place, mode) for mode in self._modes_of(place, self._limits)}
                fused = self._described[name].path == "fused"
                ends = {mode: costs[replace(mode, keep="inputs")] for mode in costs if fused and mode.keep is not None}
                own = [(mode, cost.mode(ending=ends.get(mode))) for mode, cost in costs.items()]
                if (x := inputs[place]) > 0:
                    waits = self._waits(x, place)
                    kept = [(mode, cost) for mode, cost in costs.items() if mode.keep is not None]
                    own += [(replace(mode, offload=True), cost.mode(x, waits)) for mode, cost in kept]
            passing = Passing(cost.forward_seconds, max(0, cost.forward - cost.saved))
            gradients = 0 if self._base.accumulated else profile.gradients
            unit = Unit(tuple(mode for _, mode in own), gradients, cost.saved, passing)
            found.append(Layer(name, tuple(mode for mode, _ in own), unit))
        return tuple(found)

    def _cost(self, place: int, mode: LayerMode) -> Cost:
        there, cost = self._known[self._kinds[place], mode]
        return cost.shifted(self.kept[place], self.kept[there])

    def _inputs(self) -> list[int]:
        """Bytes of each layer's input that may wait on the host: not the last one's."""
        if self._steps.device.kind != "cuda" or not self._kinds:
            return [0] * len(self._names)
        moved = self._steps.of(CheckpointPolicy.uniform(offload=True)).layers
        return [max(0, cost.saved - layer.saved) for cost, layer in zip(self.kept, moved, strict=False)]

    def _waits(self, x: int, place: int) -> float:
        """Seconds that the next layer waits for a copy of so many bytes, which it hides otherwise."""
        copied, beside = x / self._steps.device.link, self.kept[place + 1]
        return max(0.0, copied - beside.forward_seconds) + max(0.0, copied - beside.backward_seconds)


def _loss(head: HeadMode) -> dict[str, Any]:
    return {"loss": head.loss, "loss_scratch": head.scratch}
