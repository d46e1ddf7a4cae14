"""Two results beside each other: noise is no change, and machines are compared by their own first variant."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.compare import compared

pytestmark = pytest.mark.once
ROWS = {
    "plain": {"p20": 0.9, "median": 1.0, "p80": 1.1, "peak": 100},
    "ours": {"p20": 0.45, "median": 0.5, "p80": 0.55, "peak": 50},
    "wrong": {"refused": "it is wrong"},
}
RESULT: dict[str, Any] = {
    "benchmark": "step",
    "cases": [{"case": "", "rows": ROWS}],
    "environment": {"cpu": {"model": "one"}, "threads": 2},
}


def changed(factor: float, **environment: Any) -> dict[str, Any]:
    """The same with other times of ours, elsewhere."""
    found = copy.deepcopy(RESULT)
    found["environment"] |= environment
    for name in ("p20", "median", "p80"):
        found["cases"][0]["rows"]["ours"][name] *= factor
    return found


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1.0, "1.00×, within noise"), (1.15, "1.15×, within noise"), (1.3, "1.30×, slower"), (0.7, "0.70×, faster")],
)
def test_noise_is_no_change(factor: float, said: str) -> None:
    assert f"| ours | {said} |" in compared(RESULT, changed(factor))


def test_another_machine_is_compared_by_its_first_variant() -> None:
    """Everything takes twice as long there, and ours is no slower for that."""
    other = changed(2.0, cpu={"model": "two"})
    for name in ("p20", "median", "p80"):
        other["cases"][0]["rows"]["plain"][name] *= 2
    page = compared(RESULT, other)
    assert "| ours | 1.00×, within noise |" in page and "the machines differ" in page


def test_bytes_are_exact_and_other_benchmarks_are_refused() -> None:
    other = changed(1.0)
    other["cases"][0]["rows"]["ours"]["peak"] = 51
    assert "peak +2.0%" in compared(RESULT, other) and "peak" not in compared(RESULT, RESULT)
    with pytest.raises(SystemExit, match="one benchmark, got step and policies"):
        compared(RESULT, RESULT | {"benchmark": "policies"})
