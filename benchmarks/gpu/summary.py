"""The page of results: parts, goals and times as Markdown tables. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import MEASURED, Outcome
from benchmarks.tables import goal_table, table, tuned_table

TOP = 8


def results(stem: str, out: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the benchmarks among these parts wrote."""
    paths = {name: out / f"{stem}_{name}.json" for name in names if name in MEASURED}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def summary(device: str, outcomes: dict[str, Outcome], found: dict[str, dict[str, Any]]) -> str:
    """The parts and the goals as Markdown."""
    rows: list[list[object]] = [
        [name, o.status, f"{o.seconds:.0f} s" if o.seconds else "", o.detail.replace("|", "\\|")[:150]]
        for name, o in outcomes.items()
    ]
    lines = [f"# GPU: {device}", "", table(["part", "status", "took", "last word"], rows), ""]
    goals = [goal | {"name": f"{case}: {goal['name']}"} for case, result in found.items() for goal in result["goals"]]
    if goals:
        lines += [goal_table(goals), ""]
    for case, result in found.items():
        lines += details(case, result)
    if found:
        where = next(iter(found.values()))["environment"]
        versions = f"torch {where['torch']}, ckptfused {where['ckptfused']}, commit {where['commit']}"
        lines += [f"{versions}, {where['cpu']['model']}, {where['threads']} threads.", ""]
    return "\n".join(lines)


def details(case: str, result: dict[str, Any]) -> list[str]:
    """The times of one result file as a table, and what failed."""
    lines = [f"## {case}", ""]
    for name, said in result.get("failed", {}).items():
        texts = said if isinstance(said, dict) else {"error": said}
        lines += [f"**{name} failed.**", "", "```", *(f"{how}: {text}" for how, text in texts.items()), "```", ""]
    return [*lines, _table(case, result), ""]


def kernel_table(variants: dict[str, Any]) -> str:
    """A table of each variant's kernels: all together, and those that take longest."""
    rows: list[list[object]] = []
    for name, step in variants.items():
        rows.append([f"**{name}**", step["kernels"], f"{step['milliseconds']:.2f}"])
        rows += [[row["kernel"][:90].replace("|", "\\|"), row["calls"], f"{row['milliseconds']:.3f}"]
                 for row in step["top"][:TOP]]  # fmt: skip
    return table(["kernel", "calls", "ms"], rows)


def grid_table(attention: dict[str, Any]) -> str:
    """A table of every attention kernel, scratch limit and preset."""
    rows: list[list[object]] = [
        [name, row["scratch"], row["keep"], f"{row['median']:.2f}", _size(row, "peak", 20)]
        for name, found in attention.items()
        for row in found["rows"]
    ]
    return table(["attention", "scratch", "keep", "ms", "peak MiB"], rows)


def model_table(models: dict[str, Any]) -> str:
    """A table of every model, setting and way of training; shares are of the first way's time and peak."""
    rows: list[list[object]] = []
    for name, result in models.items():
        base: dict[str, Any] = next(iter(result["variants"].values()), {})
        rows += [
            [name, variant, f"{row['median']:.1f}", f"{row['median'] / base['median']:.3f}", _size(row, "peak", 30),
             row["said"]]
            for variant, row in result["variants"].items()
        ]  # fmt: skip
    return table(["model, setting", "variant", "ms", "of the first", "peak GiB", ""], rows)


def _size(row: dict[str, Any], key: str, power: int) -> str:
    return f"{row[key] / 2**power:.2f}" if key in row else ""


def _table(case: str, result: dict[str, Any]) -> str:
    if case == "smoke":
        return f"{len(result['right'])} checks are right, in {result['seconds']:.0f} s."
    if case == "tune":
        return tuned_table(result["shapes"])
    if case == "grid":
        return grid_table(result["attention"])
    if case == "models":
        return model_table(result["models"])
    if case == "profile":
        return kernel_table(result["variants"])
    if case == "micro":
        rows: list[list[object]] = [
            [r["op"], f"{r['milliseconds']['ckptfused']['median']:.4f}", f"{r['GB/s']:.0f}", f"{r['copy GB/s']:.0f}",
             f"{100 * r['of copy']:.0f} %", f"{100 * r['eager of copy']:.0f} %",
             f"{100 * r['liger of copy']:.0f} %" if r["liger of copy"] else ""]
            for r in result["ops"]
        ]  # fmt: skip
        head = ["kernel", "ms", "GB/s", "copy GB/s", "of copy", "eager of copy", "Liger of copy"]
    elif case == "attention":
        rows = [
            [f"{name}, dropout {r['p']}", f"{t['median']:.3f}", f"{t['p20']:.3f}", f"{t['p80']:.3f}",
             f"{r['TFLOP/s'][name]:.0f}"]
            for r in result["attention"]
            for name, t in r["milliseconds"].items()
        ]  # fmt: skip
        rows += [
            [f"cuBLAS {name}", f"{r['median']:.3f}", f"{r['p20']:.3f}", f"{r['p80']:.3f}", f"{r['TFLOP/s']:.0f}"]
            for name, r in result["cublas"].items()
        ]
        head = ["kernel", "ms", "p20", "p80", "TFLOP/s"]
    else:
        rows = []
        for name, t in result["milliseconds"].items():
            used, ideal = result["bytes"].get(name, {}), result["ideal milliseconds"].get(name)
            sizes = [f"{used[key] / 2**20:.0f}" if used else "" for key in ("saved", "peak")]
            rows.append(
                [name, f"{t['median']:.2f}", f"{t['p20']:.2f}", f"{t['p80']:.2f}", ideal if ideal else "", *sizes]
            )
        head = [f"{result['attention kernel']} attention", "ms", "p20", "p80", "ideal ms", "saved MiB", "peak MiB"]
    return table(head, rows)
