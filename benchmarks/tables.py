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


def tuned_table(shapes: list[dict[str, Any]]) -> str:
    """A table of the entries that tune_ffn made: milliseconds of every path, by kernel."""
    rows: list[list[object]] = [
        [r["shape"], kernel, *(f"{ms:.3f}" for ms in paths.values()), "yes" if kernel == r["choice"] else ""]
        for r in shapes
        for kernel, paths in r["all_ms"].items()
    ]
    paths = next(iter(shapes[0]["all_ms"].values())) if shapes else {}
    return table(["FFN", "kernel", *(f"{path}, ms" for path in paths), "chosen"], rows)
