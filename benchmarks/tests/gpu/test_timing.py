"""Goals, and the order in which variants are timed."""

from __future__ import annotations

from benchmarks.gpu.timing import Clock, Goal, Times


def test_goals() -> None:
    assert Goal("speed", 1.1, 1.08, True).met
    assert not Goal("time", 1.3, 1.28, False).met
    assert not Goal("nothing", float("nan"), 1.0, True).met


def test_variants_take_turns_and_each_round_is_told() -> None:
    order: list[str] = []
    told: list[dict[str, Times]] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}  # type: ignore[misc]
    times = Clock("cpu").compare(calls, seconds=0, rounds=3, after=told.append)
    assert "".join(order[6:]) == "abcbcacab"
    assert all(t.rounds == 3 and t.p20 <= t.median <= t.p80 for t in times.values())
    assert [{t.rounds for t in now.values()} for now in told] == [{1}, {2}, {3}]
    assert told[-1] == times
