"""The modes of each layer, and what they cost in predicted steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from ckptfused.models.describe.counts import kind_of
from ckptfused.models.experts.read import has_experts
from ckptfused.models.install import InstalledLayer
from ckptfused.models.layer_mode import LayerMode
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.offload.copies import pinned_bytes
from ckptfused.planner import frontier
from ckptfused.planner.frontier import Passing, Unit
from ckptfused.planner.layer_costs import Cost, embeddings_of, held_beside, measured_costs
from ckptfused.planner.predicted_steps import PredictedSteps
from ckptfused.profiler.result import Profile
from ckptfused.spec.keep import KEEP_PRESETS

UNCONVERTED = LayerMode(None)


class HeadMode(NamedTuple):
    """How the loss is made."""

    loss: str | None = None
    scratch: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What a policy is told of it."""
        return {"loss": self.loss, "loss_scratch": self.scratch}


class Layer(NamedTuple):
    """A layer and its modes, in the order in which they are preferred where they cost the same."""

    name: str
    modes: tuple[LayerMode | None, ...]
    """Modes that the layer may have; None alone for a module of ckptfused's own, which no policy changes."""
    unit: Unit
    joins: bool = True
    """Whether a plan may join it to a segment: not where it has experts, whose router a replay would ask again."""


class ModeCosts:
    """Bytes and seconds of each layer in each of its modes, of which `read` has steps predicted."""

    def __init__(self, steps: PredictedSteps, installed: Iterable[InstalledLayer], base: Profile) -> None:
        self._steps = steps
        self._base = base
        self._installed = {one.name: one for one in installed}
        self.kept = measured_costs(base)
        """Costs of all layers and the head, all in the mode `"inputs"`."""
        self.constant, self.embeddings = held_beside(base), embeddings_of(base)
        self._workspaces = {HeadMode(): base.workspace}
        self.heads = {HeadMode(): self.kept[-1]}
        self._names = [layer.name for layer in base.layers]
        self._places = [place for place, name in enumerate(self._names) if name in self._installed]
        self._modes: list[tuple[LayerMode, ...]] = []
        self._kinds = self._kinds_of()
        self._known: dict[tuple[int, LayerMode], tuple[int, Cost]] = {}
        self._as_they_were: dict[int, Cost] = {}
        """Costs of layers that were looked at as they were, between others in the mode `"inputs"`."""
        self._lent: dict[int, int] = {}
        """Bytes of outputs that what runs between layers would hold, if layers that are as they were did not."""
        self._spared: dict[int, tuple[tuple[Cost, Cost], tuple[Cost, Cost]]] = {}
        """Costs of what comes after a layer that keeps its output when it is as it was: there and alone, in the
        mode `"inputs"` and as it was."""

    def _measured(self, policy: CheckpointPolicy) -> list[Cost]:
        profile = self._steps.of(policy)
        self.constant = max(self.constant, held_beside(profile))
        self.embeddings = min(self.embeddings, embeddings_of(profile))
        head = HeadMode(policy.loss, policy.loss_scratch)
        self._workspaces[head] = max(self._workspaces.get(head, 0), profile.workspace)
        return measured_costs(profile)

    def differs(self, head: HeadMode, scratch: int | None) -> bool:
        """Whether a limit changes what any layer costs; and what a head costs."""
        *found, self.heads[head] = self._measured(CheckpointPolicy.uniform(scratch=scratch, **head.options))
        return found != self.kept[:-1]

    def workspaces(self, heads: Iterable[HeadMode]) -> tuple[int, ...]:
        """The most that a product may allocate within itself, by the mode of the head. Layers were looked at beside the
        plain head: what they add to it, they add to others."""
        own = self._workspaces
        of_layers = own[HeadMode()] if own[HeadMode()] > self._base.workspace else 0
        return tuple(max(own[head], of_layers) for head in heads)

    def _kinds_of(self) -> dict[int, int]:
        """Which layers are alike, by numbers."""
        known: dict[Any, int] = {}
        kinds = {}
        for place in self._places:
            one = self._installed[self._names[place]]
            parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in one.layer.parameters())
            own = kind_of(one.layer, (), {}) if one.path == "generic" else one.outcome
            facts = type(one.layer), parameters, one.reason, own
            kinds[place] = known.setdefault(facts, len(known))
        return kinds

    def _modes_of(self, place: int, limits: Iterable[int | None]) -> tuple[LayerMode, ...]:
        if self._installed[self._names[place]].path not in ("fused", "part"):
            return (LayerMode(), UNCONVERTED)
        return (*(LayerMode(keep, scratch) for scratch in limits for keep in KEEP_PRESETS), UNCONVERTED)

    def read(self, limits: tuple[int | None, ...]) -> None:
        """Predicts steps in which one layer of each kind keeps what each of its modes does once, and others in which
        every second layer is as it was.

        The ends of a stack come last, where a layer may cost what others of its kind do not.
        """
        members: defaultdict[int, list[int]] = defaultdict(list)
        for place, kind in self._kinds.items():
            members[kind].append(place)
        self._limits = limits
        runs: defaultdict[int, dict[int, LayerMode]] = defaultdict(dict)
        inner = [[*own[1:-1], *own[-1:], *own[:1]] if len(own) > 1 else own for own in members.values()]
        for own in inner:
            self._known[self._kinds[own[0]], LayerMode()] = own[0], self.kept[own[0]]
            for index, mode in enumerate(self._modes_of(own[0], limits)[1:-1]):
                runs[index // len(own)][own[index % len(own)]] = mode
        for run in runs.values():
            found = self._measured(self._policy(run))
            for place, mode in run.items():
                self._known[self._kinds[place], mode] = place, found[place]
        self._read_as_they_were(inner)

    def _policy(self, run: dict[int, LayerMode]) -> CheckpointPolicy:
        """These places in these modes, all others in `"inputs"`."""
        modes = {self._names[place]: mode for place, mode in run.items()}
        return CheckpointPolicy.per_layer([modes.get(name, LayerMode()) for name in self._installed])

    def _read_as_they_were(self, members: list[list[int]]) -> None:
        """Predicts steps in which one layer of each kind is as it was, between others that keep no output of theirs: it
        costs what it does alone, and the one after it shows whether its input is held for it. If so, every second layer
        is as it was, and then all.

        members: the places of each kind, the best to be looked at first.
        """
        alone, after = self._as_they_were, dict[int, Cost]()

        def look(places: Iterable[int]) -> None:
            for odd in (0, 1):
                if run := {place: UNCONVERTED for place in places if place % 2 == odd}:
                    found = self._measured(self._policy(run))
                    alone.update((place, found[place]) for place in run)
                    nexts = (place + 1 for place in run)
                    after.update((place, found[place]) for place in nexts if found[place].holds_less(self.kept[place]))

        shown = [next((place for place in own if place % 2), own[0]) for own in members]
        look(shown)
        if any(self._held_for_between([place for place in shown if place % 2 == odd]) for odd in (0, 1)):
            lent = {place: self._held_for_between([place]) for place in self._places}
            self._lent.update((place, size) for place, size in lent.items() if size > 0)
        self._known.update(((self._kinds[place], UNCONVERTED), (place, alone[place])) for place in shown)
        if after:
            look(self._places)
            together = self._measured(CheckpointPolicy.none())
            for place, cost in after.items():
                as_it_was = (together[place], alone[place]) if place in alone else (cost, self.kept[place])
                self._spared[place] = (cost, self.kept[place]), as_it_was

    def _held_for_between(self, places: list[int]) -> int:
        """Bytes that are among those of layers which are as they were, and else held by what runs between layers."""
        profile = self._steps.of(self._policy(dict.fromkeys(places, UNCONVERTED)))
        return held_beside(self._base) - held_beside(profile)

    def head(self, heads: Iterable[HeadMode]) -> Unit:
        """The loss head, as the last unit."""
        return Unit(tuple(self._mode(len(self._names), None, self.heads[head]) for head in heads))

    def layers(self, host_memory: float) -> tuple[Layer, ...]:
        """All layers, with offload where it is possible: of the first ones whose inputs the host has room for."""
        inputs, room = self._inputs(), host_memory
        found = []
        for place, (name, cost, profile) in enumerate(zip(self._names, self.kept, self._base.layers, strict=False)):
            own: list[tuple[LayerMode | None, frontier.UnitMode]] = [(None, self._mode(place, None, cost))]
            if place in self._kinds:
                costs = {mode: self._cost(place, mode) for mode in self._modes_of(place, self._limits)}
                fused = self._installed[name].path == "fused"
                ends = {mode: costs[replace(mode, keep="inputs")] for mode in costs if fused and mode.keep is not None}
                own = [(mode, self._mode(place, mode, cost, ends.get(mode))) for mode, cost in costs.items()]
                if (x := inputs[place]) > 0 and pinned_bytes(x) <= room:
                    room -= pinned_bytes(x)
                    waits = self._waits(x, place)
                    kept = [(mode, cost) for mode, cost in costs.items() if mode.keep is not None]
                    own += [(replace(mode, offload=True), cost.mode(x, waits)) for mode, cost in kept]
            passing = Passing(cost.forward_seconds, max(0, cost.forward - cost.saved))
            gradients = 0 if self._base.accumulated else profile.gradients
            spared = cost.saved - self._after_output(place, None, cost).saved
            unit = Unit(tuple(mode for _, mode in own), gradients, cost.saved, passing, spared)
            joins = name not in self._installed or not has_experts(self._installed[name].layer)
            found.append(Layer(name, tuple(mode for mode, _ in own), unit, joins))
        return tuple(found)

    def _cost(self, place: int, mode: LayerMode) -> Cost:
        if mode == UNCONVERTED and place in self._as_they_were:
            return self._as_they_were[place].without(self._lent.get(place, 0))
        there, cost = self._known[self._kinds[place], mode]
        found = cost.shifted(self.kept[place], self.kept[there])
        return found.without(self._lent.get(place, 0)) if mode == UNCONVERTED else found

    def _mode(self, place: int, mode: LayerMode | None, cost: Cost, ending: Cost | None = None) -> frontier.UnitMode:
        """For the programme: alone, and after a layer that keeps its output."""
        keeps_output = mode == UNCONVERTED and place + 1 in self._spared
        alone = cost.mode(ending=ending, keeps_output=keeps_output)
        if place not in self._spared:
            return alone
        last = ending and self._after_output(place, mode, ending)
        spared = self._after_output(place, mode, cost).mode(ending=last, keeps_output=keeps_output)
        return alone._replace(spared=spared, ending=alone.ending and alone.ending._replace(spared=spared.ending))

    def _after_output(self, place: int, mode: LayerMode | None, cost: Cost) -> Cost:
        """What a layer costs whose input is held by the one before it."""
        if place not in self._spared:
            return cost
        return cost.spared(*self._spared[place][mode == UNCONVERTED])

    def _inputs(self) -> list[int]:
        """Bytes of each layer's input that may wait on the host: not the last one's."""
        if self._steps.device.kind != "cuda" or not self._kinds:
            return [0] * len(self._names)
        moved = self._steps.of(CheckpointPolicy.uniform(offload=True)).layers
        return [max(0, cost.saved - layer.saved) for cost, layer in zip(self.kept, moved, strict=False)]

    def _waits(self, x: int, place: int) -> float:
        """Seconds that copies of so many bytes, there and back, take of the next layer's: what it does not hide, and
        what the device's memory is read and written for them."""
        device, beside = self._steps.device, self.kept[place + 1]
        copied, moved = x / device.link, 2 * x / device.copy
        return moved + max(0.0, copied - beside.forward_seconds) + max(0.0, copied - beside.backward_seconds)
