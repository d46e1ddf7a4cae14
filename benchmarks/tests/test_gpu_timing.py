"""Goals, checks and the order in which variants are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_timing import Clock, Goal, expect_close


def test_goals_and_checks() -> None:
    assert Goal("speed", 1.1, 1.08, True).met
    assert not Goal("time", 1.3, 1.28, False).met
    assert not Goal("nothing", float("nan"), 1.0, True).met
    right = torch.ones(4)
    expect_close("fine", right + 1e-4, right, 1e-3)
    with pytest.raises(SystemExit, match="wrong result, no time reported"):
        expect_close("nan", torch.tensor([1.0, 1.0, torch.nan, 1.0]), right, 1e-3)


def test_variants_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}  # type: ignore[misc]
    times = Clock("cpu").compare(calls, seconds=0, rounds=3)
    assert "".join(order[6:]) == "abcbcacab"
    assert all(t.rounds == 3 and t.p20 <= t.median <= t.p80 for t in times.values())
