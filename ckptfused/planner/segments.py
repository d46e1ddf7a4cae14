"""Plans whose layers are joined to segments, each of which saves its first input alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import ceil, inf

from ckptfused.models.policy import CheckpointPolicy
from ckptfused.planner.frontier import Before, Front, Unit, UnitMode, peak_of, seconds_of
from ckptfused.planner.predicted_steps import PredictedSteps
from ckptfused.planner.step_costs import SCRATCHES, Costs


class Divided:
    """The front of all ways to join layers to segments, and of what the others, and those in a replay, keep."""

    def __init__(self, costs: Costs, limit: int) -> None:
        """limit: bytes of layers and head above which there is nothing to look for."""
        self._costs = costs
        self._stays = [_staying(layer.unit) for layer in costs.layers]
        joined = [layer.unit if layer.joins else layer.unit._replace(passing=None) for layer in costs.layers]
        units = [_only(unit, stays) for unit, stays in zip(joined, self._stays, strict=True)]
        self._front = Front([*units, costs.head], 1, limit) if _together(costs) else None

    @property
    def peaks(self) -> list[int]:
        return [] if self._front is None else [self._costs.peak(peak) for peak in self._front.peaks]

    @property
    def seconds(self) -> list[float]:
        return [] if self._front is None else [*map(self._costs.seconds, self._front.seconds)]

    def policy(self, place: int) -> CheckpointPolicy:
        """The policy of a point."""
        assert self._front is not None
        *parts, head = self._front[place].parts
        runs = [(part,) if isinstance(part, int) else part for part in parts]
        chosen = [mode for run in runs for mode in run]
        modes = [
            layer.modes[stays[mode]]  # type: ignore[index]
            for layer, stays, mode in zip(self._costs.layers, self._stays, chosen, strict=True)
        ]
        loss, scratch = self._costs.heads[head]  # type: ignore[index]
        alone = all(isinstance(part, int) for part in parts)
        lengths = None if alone else tuple(map(len, runs))
        return CheckpointPolicy(tuple(modes), False, None, loss, scratch, lengths)  # type: ignore[arg-type]

    @staticmethod
    def of(costs: Costs, policy: CheckpointPolicy) -> tuple[int, float] | None:
        """Peak and seconds of one such policy; None where one of its modes was not counted."""
        plain = CheckpointPolicy(policy.layers, policy.repeat, loss=policy.loss, loss_scratch=policy.loss_scratch)
        chosen = costs.indices(plain)
        if chosen is None or not _together(costs):
            return None
        *modes, head = chosen
        fixed = [_only(layer.unit, [mode]) for layer, mode in zip(costs.layers, modes, strict=True)]
        runs = [fixed[begin:end] for begin, end in pairwise(accumulate(policy.lengths(len(fixed)), initial=0))]
        alone = policy.segment_lengths is not None  # where a run of one layer is no segment
        units = [run[0] if alone and len(run) == 1 else _joined(run) for run in runs] + [_only(costs.head, [head])]
        first = [0] * len(units)
        return costs.peak(peak_of(units, first), head), costs.seconds(seconds_of(units, first))


class OnHost:
    """Segments of equal length whose inputs wait on the host of a GPU, where it has no room for those of all layers: as
    short as it allows, with the least that a loss takes, in one piece or in tiles."""

    def __init__(self, steps: PredictedSteps, costs: Costs) -> None:
        all_join = _together(costs) and all(layer.joins for layer in costs.layers)
        on_host = steps.device.kind == "cuda" and 0 < costs.host_memory < inf and all_join
        self._found = _waiting(steps, costs) if on_host else []
        profiles, base = [steps.of(policy) for policy in self._found], costs.base
        self.peaks = [one.peak - one.optimizer + base.optimizer for one in profiles]
        self.seconds = [one.seconds - one.optimizer_seconds + base.optimizer_seconds for one in profiles]

    def policy(self, place: int) -> CheckpointPolicy:
        return self._found[place]


def _waiting(steps: PredictedSteps, costs: Costs) -> list[CheckpointPolicy]:
    """The policies of `OnHost`."""
    needed, count = steps.of(CheckpointPolicy.uniform(offload=True)).host, len(costs.layers)
    options = {"offload": True, **costs.heads[-1].options}
    for length in range(2, count):
        many = ceil(count / length)
        # The last one's input stays where it is, and the first one's where embeddings are frozen.
        if (many - 2) * needed > costs.host_memory * (count - 1):
            continue
        found = [CheckpointPolicy.segments(many, scratch=scratch, **options) for scratch in (None, SCRATCHES[0])]
        if steps.of(found[0]).host <= costs.host_memory:
            return found
    return []


def _staying(unit: Unit) -> list[int]:
    """The modes in which nothing lingers: a segment is replayed in no other."""
    return [place for place, mode in enumerate(unit.modes) if mode.lingers == 0]


def _only(unit: Unit, modes: list[int]) -> Unit:
    return unit._replace(modes=tuple(unit.modes[place] for place in modes))


def _together(costs: Costs) -> bool:
    """Whether all layers are ones that a policy can join."""
    return bool(costs.layers) and all(layer.modes != (None,) for layer in costs.layers)


def _joined(units: list[Unit]) -> Unit:
    """A segment of units with one mode each, as a unit whose mode is its replay."""
    *before, last = units
    first, again = [0] * len(units), [*before, last._replace(modes=(last.modes[0].ending or last.modes[0],))]
    seconds = sum(unit.passing.seconds for unit in units if unit.passing is not None) + seconds_of(again, first)

    def mode(left: Before) -> UnitMode:
        held, passing = left.input(units[0]), 0
        for place, unit in enumerate(units):
            assert unit.passing is not None
            passing = max(passing, held + unit.passing.peak + (unit.input if place else 0))
        return UnitMode(seconds, held, passing, peak_of(again, first, left))

    alone = mode(Before())._replace(spared=mode(Before(keeps_output=True)))
    return Unit((alone,), sum(unit.gradients for unit in units))
