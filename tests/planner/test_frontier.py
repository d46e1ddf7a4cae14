"""The planner's dynamic programme against exhaustive search, and against a step that is walked through."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfused.planner import frontier
from ckptfused.planner.frontier import Choice, Front, Part, Passing, Unit, UnitMode, peak_of, seconds_of

pytestmark = pytest.mark.once


class Step:
    """A step that is walked through: what is held, and the most that was."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.held = self.most = 0
        self.seconds = 0.0

    def reach(self, above: int) -> None:
        self.most = max(self.most, self.held + above)

    def run(
        self, begin: int, parts: Sequence[Part], lingers: int = 0, replay: bool = False, given: bool = False
    ) -> None:
        """Forward and backward of the units from `begin` on, in these parts. given: the one before keeps its output."""
        if not parts:
            return
        part, unit = parts[0], self.units[begin]
        if isinstance(part, int):
            mode = unit.modes[part]
            if replay and len(parts) == 1:
                mode = mode.ending or mode
            mode = mode.spared if given and mode.spared else mode
            self.reach(lingers + mode.forward)
            self.held += mode.saved
            self.run(begin + 1, parts[1:], mode.lingers or lingers, replay, mode.keeps_output)
            self.held -= mode.saved
            self.reach(lingers + mode.backward)
            self.held += unit.gradients
            self.seconds += mode.seconds
            return
        inside = range(begin, begin + length(part))
        kept = unit.input - (unit.spared if given else 0)
        self.held += kept
        for index in inside:
            passing = self.units[index].passing
            assert passing is not None
            self.reach(lingers + passing.peak + (self.units[index].input if index > begin else 0))
            self.seconds += passing.seconds
        self.run(begin + len(inside), parts[1:], lingers, replay)
        self.held -= kept  # the replay's first unit counts it
        self.run(begin, part, lingers, replay=True, given=given)


def walked(units: Sequence[Unit], parts: Sequence[Part]) -> tuple[int, float]:
    step = Step(units)
    step.run(0, parts)
    assert step.held == sum(unit.gradients for unit in units)
    return step.most, step.seconds


def length(parts: Sequence[Part]) -> int:
    return sum(1 if isinstance(part, int) else length(part) for part in parts)


def drawn(rng: random.Random, most_units: int, most_modes: int, kinds: int = 9, lingers: bool = True) -> list[Unit]:
    """A chain in whole seconds, so that sums are exact."""

    def mode(ending: UnitMode | None = None) -> UnitMode:
        saved, x = rng.randint(0, 12), rng.randint(0, 4)
        forward, backward = saved + rng.randint(0, 12), saved + rng.randint(0, 12)
        waits, keeps = rng.choice((0, 0, 3, 5)) if lingers else 0, rng.random() < 0.3
        alone = UnitMode(rng.randint(1, 9), saved, forward, backward, waits, ending, keeps)
        spared = alone._replace(saved=max(0, saved - x), forward=max(0, forward - x), backward=max(0, backward - x))
        return alone._replace(spared=rng.choice((None, spared)))

    def unit() -> Unit:
        modes = tuple(mode(rng.choice((None, mode()))) for _ in range(rng.randint(1, most_modes)))
        x = rng.randint(0, 4)
        passing = Passing(rng.randint(1, 4), rng.randint(0, 6))
        return Unit(modes, rng.randint(0, 6), x, passing, rng.randint(0, x))

    of = [unit() for _ in range(kinds)]
    return [rng.choice(of) for _ in range(rng.randint(1, most_units))]


def pareto(points: Iterator[tuple[int, float]]) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for peak, seconds in sorted(set(points)):
        if not found or seconds < found[-1][1]:
            found.append((peak, seconds))
    return found


def front_of(front: Front) -> list[tuple[int, float]]:
    return list(zip(front.peaks, front.seconds, strict=True))


@pytest.mark.parametrize("kinds", [1, 2, 9])
def test_modes_against_brute_force(kinds: int) -> None:
    """The whole front, the choices behind it, and each budget at, below and above a step of it."""
    for seed in range(500):
        units = drawn(random.Random(seed), 5, 4, kinds)
        every = itertools.product(*(range(len(unit.modes)) for unit in units))
        best = pareto(walked(units, modes) for modes in every)
        front = Front(units)
        assert front_of(front) == best, seed
        for choice in (front[0], front[-1], front[len(front) // 2]):
            assert walked(units, choice.parts) == (choice.peak, choice.seconds)
            assert (peak_of(units, choice.parts), seconds_of(units, choice.parts)) == (choice.peak, choice.seconds)
        for budget in {peak + step for peak, _ in best for step in (-1, 0, 1)}:
            found = front.within(budget)
            fitting = [seconds for peak, seconds in best if peak <= budget]
            assert (None if found is None else found.seconds) == min(fitting, default=None)


def trees(units: Sequence[Unit], begin: int, end: int, depth: int) -> Iterator[tuple[Part, ...]]:
    """All ways of running these units, with segments so deep."""
    if begin == end:
        yield ()
        return
    for rest in trees(units, begin + 1, end, depth):
        for mode in range(len(units[begin].modes)):
            yield (mode, *rest)
    for split in range(begin + 1, end if depth else begin):
        for inner in trees(units, begin, split, depth - 1):
            for rest in trees(units, split, end, depth):
                yield (inner, *rest)


@pytest.mark.parametrize("depth", [1, 2, None])
def test_segments_against_exhaustive_search(depth: int | None) -> None:
    for seed in range(120):
        rng = random.Random(seed)
        units = drawn(rng, 4, 2, rng.choice((1, 9)), lingers=False)
        if seed % 3 == 0:  # a loss head, which no segment takes in
            units[-1] = units[-1]._replace(passing=None)
        best = pareto(walked(units, parts) for parts in trees(units, 0, len(units), 9 if depth is None else depth))
        front = Front(units, depth)
        assert front_of(front) == best, seed
        for choice in map(front.__getitem__, range(len(front))):
            assert walked(units, choice.parts) == (choice.peak, choice.seconds)


@pytest.mark.parametrize("depth", [0, 1, None])
def test_a_limit_leaves_out_what_needs_more(depth: int | None) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        units = drawn(rng, 6, 3, rng.choice((1, 9)))
        whole = front_of(Front(units, depth))
        for limit in (whole[0][0] - 1, whole[0][0], whole[len(whole) // 2][0], whole[-1][0]):
            limited = Front(units, depth, limit)
            assert front_of(limited) == [point for point in whole if point[0] <= limit]
            for choice in map(limited.__getitem__, range(len(limited))):
                assert walked(units, choice.parts) == (choice.peak, choice.seconds)


def test_segments_need_less_than_any_mode() -> None:
    """Sixteen units that save their input, of 100 bytes: segments of them hold the square root."""
    unit = Unit((UnitMode(3.0, 100, 200, 200), UnitMode(2.0, 500, 500, 500)), 0, 100, Passing(1.0, 100))
    least = {depth: Front([unit] * 16, depth)[0] for depth in (0, 1, 2, None)}
    assert [choice.peak for choice in least.values()] == sorted((c.peak for c in least.values()), reverse=True)
    assert least[0].peak == 15 * 100 + 200 and least[1].peak == 700 and least[None].peak < 600
    assert least[1].seconds <= 16 * 3 + 16 * 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 60))
def test_more_memory_is_never_slower(seed: int, budget: int, more: int) -> None:
    rng = random.Random(seed)
    front = Front(drawn(rng, 8, 5), rng.choice((0, 1)))
    small, large = front.within(budget), front.within(budget + more)
    assert small is None or (large is not None and large.seconds <= small.seconds)
    assert small is None or small.peak <= budget
    assert front.within(front.peaks[0] - 1) is None
    assert front.peaks == sorted(set(front.peaks)) and front.seconds == sorted(set(front.seconds), reverse=True)


def awkward(count: int, modes: int) -> list[Unit]:
    """Units of which no two are alike, in bytes and seconds as they are in a model."""
    rng = random.Random(3)

    def mode() -> UnitMode:
        saved = rng.randint(10**7, 10**9)
        seconds = rng.uniform(1e-3, 5e-3) + 0.1 * (1 - saved / 10**9)
        return UnitMode(seconds, saved, saved + rng.randint(0, 10**8), saved + rng.randint(0, 10**8))

    return [Unit(tuple(mode() for _ in range(modes)), rng.randint(0, 10**9)) for _ in range(count)]


def test_long_chains_of_units_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts are cut there: what stays is true, has the least memory, and is next to the best."""
    units = awkward(12, 4)
    monkeypatch.setattr(frontier, "MOST_LABELS", 10**6)
    whole = Front(units)
    monkeypatch.setattr(frontier, "MOST_LABELS", 400)
    cut = Front(units)
    assert len(cut) <= 401 < len(whole)
    assert cut.peaks[0] == whole.peaks[0] and cut.seconds[-1] == whole.seconds[-1]
    slack = (whole.peaks[-1] - whole.peaks[0]) * len(units) // 400
    for index in range(0, len(cut), 40):
        choice = cut[index]
        assert peak_of(units, choice.parts) == choice.peak
        assert math.isclose(seconds_of(units, choice.parts), choice.seconds, rel_tol=1e-12)
        best = whole.within(choice.peak - slack)
        assert best is None or choice.seconds <= best.seconds


def test_the_gradients_of_later_units_count() -> None:
    """Backward of the first unit meets those of the second; forward does not."""
    first, second = Unit((UnitMode(1, 10, 30, 20),), 5), Unit((UnitMode(1, 0, 0, 7),), 7)
    assert Front([first, second]).peaks == [30] == [peak_of([first, second], (0, 0))]
    heavier = second._replace(gradients=11)
    assert Front([first, heavier]).peaks == [31]


def test_of_what_is_alike_the_earlier_stays() -> None:
    unit = Unit((UnitMode(2, 1, 1, 1), UnitMode(1, 2, 2, 2), UnitMode(1, 2, 2, 2)))
    assert Front([unit] * 3)[-1] == Choice(6, 3.0, (1, 1, 1))


def test_ranks_agree() -> None:
    """The same choices in processes whose hashes differ, of units with many modes alike."""
    code = f"""
import random, runpy
chain = runpy.run_path({frontier.__file__!r}, run_name="chain")
rng = random.Random(0)
for _ in range(20):
    modes = {{chain["UnitMode"](rng.randint(1, 3), *[rng.randint(1, 3)] * 3) for _ in range(9)}}
    units = [chain["Unit"](tuple(sorted(modes)), 1, 1, chain["Passing"](1, 1))] * 9
    front = chain["Front"](units, 1)
    print([front[i] for i in range(len(front))])
"""
    said = set()
    for seed in ("1", "2"):
        ran = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        said.add(ran.stdout)
        assert ran.stdout.count("\n") == 20, ran.stderr
    assert len(said) == 1


def test_no_units_and_no_modes() -> None:
    assert Front([]).within(0) == Choice(0, 0.0, ())
    assert Front([Unit((UnitMode(1, 5, 5, 5),))]).within(4) is None
    with pytest.raises(ValueError, match="at least one mode"):
        Front([Unit(())])
