"""Compares two results of one benchmark: which times changed by more than their noise, and which bytes at all.

    python -m benchmarks compare before.json after.json

The noise of a time is its band from the 20th to the 80th percentile: times whose bands overlap are the same. Results of
two processors, or numbers of threads, are compared by what each takes of the first variant's time in its own run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import table

BYTES = ("peak", "saved", "alive", "above_gradients", "with_gradients")
"""Figures that are exact: every difference counts."""


def comparable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether times of two results are of one kind of machine."""
    return all(a["environment"][name] == b["environment"][name] for name in ("cpu", "threads"))


def band(row: dict[str, Any], unit: float) -> tuple[float, float, float]:
    """The 20th percentile, the median and the 80th percentile of a variant's time."""
    return row["p20"] / unit, row["median"] / unit, row["p80"] / unit


def verdict(a: tuple[float, float, float], b: tuple[float, float, float]) -> str:
    """What the second band says beside the first."""
    ratio = f"{b[1] / a[1]:.2f}×"
    if b[0] > a[2]:
        return f"{ratio}, slower"
    return f"{ratio}, faster" if b[2] < a[0] else f"{ratio}, within noise"


def rows(a: dict[str, Any], b: dict[str, Any]) -> Iterator[list[str]]:
    """A line for each variant of either result."""
    relative = not comparable(a, b)
    others = {case["case"]: case["rows"] for case in b["cases"]}
    for case in a["cases"]:
        mine, other = case["rows"], others.get(case["case"], {})
        first = next((n for n, row in mine.items() if "median" in row and "median" in other.get(n, {})), None)
        for name in dict.fromkeys((*mine, *other)):
            if not (name in mine and name in other):
                yield [case["case"], name, "only before" if name in mine else "only after", ""]
                continue
            time, said = mine[name].get("refused", "") or other[name].get("refused", ""), []
            if "median" in mine[name] and "median" in other[name]:
                units = [r[first]["median"] if relative else 1.0 for r in (mine, other)]
                time = verdict(band(mine[name], units[0]), band(other[name], units[1]))
            for figure in BYTES:
                before, after = mine[name].get(figure), other[name].get(figure)
                if before != after:
                    change = f"{after / before - 1:+.1%}" if before and after else f"{before} → {after}"
                    said.append(f"{figure} {change}")
            yield [case["case"], name, time, ", ".join(said)]


def compared(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The page. **Raises** `SystemExit` for results of two benchmarks."""
    if a["benchmark"] != b["benchmark"]:
        raise SystemExit(f"expected results of one benchmark, got {a['benchmark']} and {b['benchmark']}")
    how = "seconds or µs" if comparable(a, b) else "shares of the first variant's time, for the machines differ"
    return f"{table(['case', 'variant', 'time', 'memory'], list(rows(a, b)))}\n\nTimes: {how}."


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    paths = parser.parse_args(words)
    print(compared(*(json.loads(path.read_text()) for path in (paths.before, paths.after))))
    return 0
