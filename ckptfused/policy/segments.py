"""Plans whose layers are joined to segments, each of which saves its first input alone."""

from __future__ import annotations

from dataclasses import replace

from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.policy.chain import Front, Mode, Unit
from ckptfused.policy.costs import Costs


class Divided:
    """The front of all ways to divide the layers evenly, with what they keep while their segment is replayed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        points = []
        for count in _counts(costs):
            runs = _Runs(costs, count)
            points += [
                (costs.peak(peak), seconds, -count, index, runs)
                for index, (peak, seconds) in enumerate(zip(runs.front.peaks, runs.front.seconds, strict=True))
            ]
        self._points: list[tuple[int, float, int, int, _Runs]] = []
        for point in sorted(points, key=lambda point: point[:4]):
            if not self._points or point[1] < self._points[-1][1]:
                self._points.append(point)

    @property
    def peaks(self) -> list[int]:
        return [peak for peak, *_ in self._points]

    @property
    def seconds(self) -> list[float]:
        return [self._costs.rest_seconds + seconds for _, seconds, *_ in self._points]

    def policy(self, place: int) -> CheckpointPolicy:
        """The policy of a point."""
        *_, index, runs = self._points[place]
        return runs.policy(index)

    @staticmethod
    def of(costs: Costs, policy: CheckpointPolicy) -> tuple[int, float] | None:
        """Peak and seconds of one such policy; None where one of its modes was not counted."""
        assert policy.segment_count is not None
        plain = CheckpointPolicy(policy.layers, policy.repeat, None, policy.loss, policy.loss_scratch)
        chosen = costs.indices(plain)
        if chosen is None or not _together(costs):
            return None
        fixed = tuple(
            layer._replace(modes=(layer.modes[index],), unit=layer.unit._replace(modes=(layer.unit.modes[index],)))
            for layer, index in zip(costs.layers, chosen, strict=False)
        )
        head = costs.head._replace(modes=(costs.head.modes[chosen[-1]],))
        runs = _Runs(_with(costs, fixed, head), policy.segment_count)
        return costs.peak(runs.front.peaks[0]), costs.rest_seconds + runs.front.seconds[0]


def _with(costs: Costs, layers: tuple, head: Unit) -> Costs:  # type: ignore[type-arg]
    return replace(costs, layers=layers, head=head)


def _together(costs: Costs) -> bool:
    """Whether all layers are ones that a policy can join."""
    return bool(costs.layers) and all(layer.modes != (None,) for layer in costs.layers)


def _counts(costs: Costs) -> list[int]:
    """Numbers of segments that differ in the length of the longest."""
    layers = len(costs.layers)
    return sorted({-(-layers // length) for length in range(2, layers + 1)}) if _together(costs) else []


class _Runs:
    """The layers divided into so many segments, as equal in length as can be."""

    def __init__(self, costs: Costs, count: int) -> None:
        self._costs, self._count = costs, count
        ends = [0]
        for place in range(count):  # as `convert` divides them
            ends.append(ends[-1] + (len(costs.layers) - ends[-1]) // (count - place))
        self._modes, self._inner, units = [], [], []
        for begin, end in zip(ends, ends[1:], strict=False):
            joined, modes, inner = _joined(costs, begin, end)
            units.append(joined)
            self._modes.append(modes)
            self._inner.append(inner)
        self.front = Front([*units, costs.head])

    def policy(self, index: int) -> CheckpointPolicy:
        *chosen, head = self.front[index].parts
        modes = []
        for place, inner, own in zip(chosen, self._inner, self._modes, strict=True):
            assert isinstance(place, int)
            modes += [of[mode] for of, mode in zip(own, inner[place].parts, strict=True)]
        loss, scratch = self._costs.heads[head]  # type: ignore[index]
        return CheckpointPolicy(tuple(modes), False, self._count, loss, scratch)


def _joined(costs: Costs, begin: int, end: int) -> tuple[Unit, list, Front]:  # type: ignore[type-arg]
    """A segment as a unit, of which a mode is a way to replay it; the modes of its layers; and the ways."""
    units, modes = [], []
    for layer in costs.layers[begin:end]:
        stays = [place for place, mode in enumerate(layer.unit.modes) if mode.lingers == 0]
        units.append(layer.unit._replace(modes=tuple(layer.unit.modes[place] for place in stays)))
        modes.append([layer.modes[place] for place in stays])
    inner = Front(units)
    held, passing, seconds = units[0].input, 0, 0.0
    for place, unit in enumerate(units):
        assert unit.passing is not None
        passing = max(passing, held + unit.passing.peak + (unit.input if place else 0))
        seconds += unit.passing.seconds
    ways = tuple(Mode(seconds + own, held, passing, peak) for peak, own in zip(inner.peaks, inner.seconds, strict=True))
    return Unit(ways, sum(unit.gradients for unit in units)), modes, inner
