"""The fastest way to run a chain of units within a budget of memory: an exact dynamic programme over plain numbers.

A unit is a layer, or whatever else stands in a step (embeddings, the loss head); a mode is a way of running it. Forward
goes through the units in order and holds what each saves; backward comes back and leaves the gradients of each unit's
parameters. With the units before i holding U and those after it leaving gradients G, its mode fits into a budget M if

    U + forward <= M    and    U + G + backward <= M.

The programme goes from the last unit to the first. A label of the units from i on is the least M - U that they need and
the time that they take, and a label that needs as much as another and is no faster is dropped. What remains before the
first unit is the whole Pareto front of memory against time. One front answers for every budget: more memory is never
slower, and no budget is ever exceeded. Numbers are whole bytes and picoseconds, so no order of addition matters; of
two labels that are alike, that of the earlier mode of the earlier unit stays.

A unit that keeps its output for its backward spares the next one its input, which is the same memory: each mode has two
costs, alone and after such a unit, and there are labels for both.

A segment is a run of units of which forward keeps the input alone; in backward its units run again, in modes of their
own, or as segments of it (Beaumont et al. 2019, Rotor).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TICKS = 10**12
"""Picoseconds of a second."""
MOST_LABELS = 4096
"""Where a front has more, only the fastest within each of so many equal ranges of memory stays, and the smallest.

Chains of a few kinds of units have hundreds. Of others a plan may then be one that needs this share less than the best.
"""
Ints = npt.NDArray[np.int64]


class UnitMode(NamedTuple):
    """One way of running a unit. Bytes are above what the units before it hold."""

    seconds: float
    """Seconds of forward and backward, replays included."""
    saved: int
    """What it holds from its forward to its backward, its input included where it saves that."""
    forward: int
    """The most that there is during its forward, `saved` included."""
    backward: int
    """The most during its backward, `saved` and the gradients of its own parameters included."""
    lingers: int = 0
    """What waits on the host, and is on the device, beside `saved`, while the units after it run, forward and backward,
    up to the next one of which something waits there."""
    ending: UnitMode | None = None
    """What it is in a replay that ends with it, whose forward is left out; None: the same."""
    keeps_output: bool = False
    """Whether it holds its output, the next unit's input, until its own backward."""
    spared: UnitMode | None = None
    """What it is after a unit that holds its input for it; None: the same."""

    def beside(self, forward: int, backward: int) -> UnitMode:
        """The mode of a unit that needs so much more while it runs."""
        ending, spared = (other and other.beside(forward, backward) for other in (self.ending, self.spared))
        more: dict[str, Any] = {"forward": self.forward + forward, "backward": self.backward + backward}
        return self._replace(**more, ending=ending, spared=spared)


class Passing(NamedTuple):
    """A forward that saves nothing."""

    seconds: float
    peak: int
    """The most during it, its output included, its input not."""


class Unit(NamedTuple):
    """A part of a step, with the modes that it may run in."""

    modes: tuple[UnitMode, ...]
    gradients: int = 0
    """Bytes of the gradients that its backward leaves."""
    input: int = 0
    """Bytes of its input, which a segment that begins with it keeps."""
    passing: Passing | None = None
    """None: no segment includes it."""
    spared: int = 0
    """The part of `input` that a unit before it that keeps its output holds for it."""


Part = int | tuple["Part", ...]
"""The mode of one unit, by its index; or a segment, by the parts that it is replayed in."""


class Before(NamedTuple):
    """What the units before another one leave it."""

    lingers: int = 0
    keeps_output: bool = False

    def after(self, mode: UnitMode) -> Before:
        """What is left to the unit after one that runs in this mode."""
        return Before(mode.lingers or self.lingers, mode.keeps_output)

    def of(self, mode: UnitMode) -> UnitMode:
        """What a mode is here."""
        return (mode.spared if self.keeps_output else None) or mode

    def input(self, unit: Unit) -> int:
        """Bytes of a unit's input that a segment which begins with it adds."""
        return unit.input - (unit.spared if self.keeps_output else 0)


class Choice(NamedTuple):
    """One point of the front."""

    peak: int
    """The most bytes above what is there when the chain begins."""
    seconds: float
    parts: tuple[Part, ...]
    """In the order of the units."""


class Labels:
    """The Pareto front of a run of units: `need` increases, `ticks` decrease."""

    def __init__(self, limit: int | None, need: Ints, ticks: Ints, way: Ints, first: Ints, second: Ints) -> None:
        """limit: labels that need more are dropped."""
        rule = np.lexsort((np.arange(len(need)), ticks, need))
        if limit is not None:
            rule = rule[need[rule] <= limit]
        need, ticks = need[rule], ticks[rule]
        stays = np.ones(len(need), dtype=bool)
        stays[1:] = ticks[1:] < np.minimum.accumulate(ticks)[:-1]
        kept = np.flatnonzero(stays)
        most = MOST_LABELS if limit is None else MOST_LABELS // 4  # of a part of the memory
        if len(kept) > most:
            low, high = int(need[kept[0]]), int(need[kept[-1]])
            step = -(-(high - low + 1) // most)
            range_of = (need[kept] - low) // step
            last = np.append(range_of[1:] != range_of[:-1], True)
            last[0] = True
            kept = kept[last]
        self.need, self.ticks = need[kept], ticks[kept]
        chosen = rule[kept]
        self.way, self.first, self.second = way[chosen], first[chosen], second[chosen]

    def __len__(self) -> int:
        return len(self.need)


_NOTHING = Labels(None, *(np.zeros(1, np.int64) for _ in range(5)))


class Front:
    """All choices of which none needs less memory and is as fast: `peaks` increase, `seconds` decrease."""

    def __init__(self, units: Sequence[Unit], depth: int | None = 0, limit: int | None = None) -> None:
        """depth: how deep segments may nest; 0: there are none, None: as deep as pays. limit: choices that need more
        memory are not looked for.
        """
        if not all(unit.modes for unit in units):
            raise ValueError("units: expected at least one mode of each")
        self._units = tuple(units)
        known: dict[Unit, int] = {}
        self._kinds = tuple(known.setdefault(unit, len(known)) for unit in self._units)
        self._sums = np.cumsum([0, *(unit.gradients for unit in self._units)]).tolist()
        self._depth, self._limit = depth, limit
        self._found: dict[tuple[tuple[int, ...], bool, Before, int | None], Labels] = {}
        for begin in reversed(range(len(self._units))):  # no deep recursion
            kept = {False, *(mode.keeps_output for mode in (self._units[begin - 1].modes if begin else ()))}
            lingers = {0, *(mode.lingers for unit in self._units[:begin] for mode in unit.modes)}
            for before in sorted(map(Before._make, itertools.product(lingers, kept))):
                self._of(begin, len(self._units), before, depth)
        self._labels = self._of(0, len(self._units), Before(), depth)

    @property
    def peaks(self) -> list[int]:
        """The memory of each choice, in bytes."""
        return self._labels.need.tolist()

    @property
    def seconds(self) -> list[float]:
        """The time of each choice."""
        return (self._labels.ticks / TICKS).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Choice:
        index = range(len(self))[index]
        parts = self._parts(0, len(self._units), Before(), self._depth, index)
        return Choice(int(self._labels.need[index]), float(self._labels.ticks[index] / TICKS), parts)

    def within(self, budget: int) -> Choice | None:
        """The fastest choice that needs no more bytes than `budget`; None: there is none."""
        index = int(np.searchsorted(self._labels.need, budget, side="right")) - 1
        return None if index < 0 else self[index]

    def _gradients(self, begin: int, end: int) -> int:
        return self._sums[end] - self._sums[begin]

    def _of(self, begin: int, end: int, before: Before, depth: int | None) -> Labels:
        """Labels of these units; gradients count from the last of them on."""
        if begin == end:
            return _NOTHING
        key = (self._kinds[begin:end], end < len(self._units), before, depth)
        if key not in self._found:
            self._found[key] = self._solve(begin, end, before, depth)
        return self._found[key]

    def _solve(self, begin: int, end: int, before: Before, depth: int | None) -> Labels:
        unit, after = self._units[begin], self._gradients(begin + 1, end)
        ends_replay = begin + 1 == end < len(self._units)
        columns = []
        for index, mode in enumerate(unit.modes):
            mode = before.of((mode.ending if ends_replay else None) or mode)
            rest = self._of(begin + 1, end, before.after(mode), depth)
            least = before.lingers + max(mode.forward, after + mode.backward)
            need = np.maximum(mode.saved + rest.need, least)
            columns.append((need, rest.ticks + _ticks(mode.seconds), index, np.arange(len(rest)), 0))
        columns += self._segments(begin, end, before, depth)
        parts = ([np.broadcast_to(column, len(row[0])) for column in row] for row in columns)
        return Labels(self._limit, *(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _segments(self, begin: int, end: int, before: Before, depth: int | None) -> list[tuple]:  # type: ignore[type-arg]
        """Forward to each later unit that saves nothing, then the units from it on, then those before it again."""
        if depth == 0:
            return []
        found, held, peak, ticks = [], before.input(self._units[begin]), 0, 0
        for split in range(begin + 1, end):
            unit = self._units[split - 1]
            if unit.passing is None:
                break
            peak = max(peak, held + unit.passing.peak + (unit.input if split - 1 > begin else 0))
            ticks += _ticks(unit.passing.seconds)
            right = self._of(split, end, Before(before.lingers), depth)
            left = self._of(begin, split, before, _inner(depth))
            needs = held + right.need, self._gradients(split, end) + left.need
            need = np.maximum(np.union1d(*needs), before.lingers + peak)
            places = [np.searchsorted(values, need, side="right") - 1 for values in needs]
            fits = (places[0] >= 0) & (places[1] >= 0)
            first, second = (place[fits] for place in places)
            found.append((need[fits], ticks + right.ticks[first] + left.ticks[second], begin - split, first, second))
        return found

    def _parts(self, begin: int, end: int, before: Before, depth: int | None, index: int) -> tuple[Part, ...]:
        parts: list[Part] = []
        while begin < end:
            labels = self._of(begin, end, before, depth)
            way, first, second = (int(column[index]) for column in (labels.way, labels.first, labels.second))
            if way >= 0:
                parts.append(way)
                begin, before, index = begin + 1, before.after(before.of(self._units[begin].modes[way])), first
            else:
                parts.append(self._parts(begin, begin - way, before, _inner(depth), second))
                begin, before, index = begin - way, Before(before.lingers), first
        return tuple(parts)


def peak_of(units: Sequence[Unit], modes: Sequence[int], before: Before = Before()) -> int:  # noqa: B008
    """The most bytes that a step needs with these modes."""
    most, held, after = 0, 0, sum(unit.gradients for unit in units)
    for unit, index in zip(units, modes, strict=True):
        mode = before.of(unit.modes[index])
        after -= unit.gradients
        most = max(most, held + before.lingers + max(mode.forward, after + mode.backward))
        held, before = held + mode.saved, before.after(mode)
    return most


def seconds_of(units: Sequence[Unit], modes: Sequence[int]) -> float:
    """The time of a step with these modes."""
    return sum(_ticks(unit.modes[index].seconds) for unit, index in zip(units, modes, strict=True)) / TICKS


def _inner(depth: int | None) -> int | None:
    return None if depth is None else depth - 1


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
