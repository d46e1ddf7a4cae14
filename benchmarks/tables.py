"""Markdown tables of results and documents. No torch here: `make gpu` says with them that there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    first, *others = (f"| {' | '.join(str(cell) for cell in line)} |" for line in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def goal_table(goals: list[dict[str, Any]]) -> str:
    rows: list[list[object]] = []
    for g in goals:
        ideal = "" if g["ideal"] is None else f"{g['ideal']:g}"
        rows.append([g["name"], f"{g['value']:.3f}", g["goal"], "yes" if g["met"] else "NO", ideal])
    return table(["goal", "value", "wanted", "met", "ideal"], rows)


def tuned_table(shapes: list[dict[str, Any]]) -> str:
    """A table of the entries that tune_ffn made: milliseconds of every path, by kernel."""
    rows: list[list[object]] = [
        [r["shape"], kernel, *(f"{ms:.3f}" for ms in paths.values()), "yes" if kernel == r["choice"] else ""]
        for r in shapes
        for kernel, paths in r["all_ms"].items()
    ]
    paths = next(iter(shapes[0]["all_ms"].values())) if shapes else {}
    return table(["FFN", "kernel", *(f"{path}, ms" for path in paths), "chosen"], rows)
