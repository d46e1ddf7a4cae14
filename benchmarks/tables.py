"""Markdown tables of the GPU benchmarks. No torch here: `make gpu` says with them that there is none."""

from __future__ import annotations

from typing import Any


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goal_table(goals: list[dict[str, Any]]) -> str:
    rows: list[list[object]] = []
    for g in goals:
        ideal = "" if g["ideal"] is None else f"{g['ideal']:g}"
        rows.append([g["name"], f"{g['value']:.3f}", g["goal"], "yes" if g["met"] else "NO", ideal])
    return table(["goal", "value", "wanted", "met", "ideal"], rows)
