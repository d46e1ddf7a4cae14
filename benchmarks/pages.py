"""A result as a page: one table of variants, what was checked, which goals were met, and where it comes from."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from benchmarks import environment
from benchmarks.benchmark import Benchmark, Rows, no_variants
from benchmarks.tables import table


def sizes_of(benchmark: Benchmark[Any], case: dict[str, Any]) -> Any:
    """The options that a case was measured with; an older result may lack those that have come since."""
    known = {field.name for field in fields(benchmark.sizes)}
    return replace(benchmark.sizes, **{name: value for name, value in case["sizes"].items() if name in known})


def page(benchmark: Benchmark[Any], result: dict[str, Any]) -> str:
    """The page of a result file."""
    cases = [(sizes_of(benchmark, case), case) for case in result["cases"]]
    several, timed = len(cases) > 1, any("median" in row for _, case in cases for row in case["rows"].values())
    unit = benchmark.clock.unit
    head = [
        *(["case"] if several else []),
        "variant",
        *([f"median, {unit}", "p20", "p80"] if timed else []),
        *(column.title for column in benchmark.columns),
    ]
    rows: list[list[object]] = []
    for sizes, case in cases:
        first = [benchmark.case(sizes)] if several else []
        rows += [[*first, *cells] for cells in _cells(benchmark, case["rows"], timed)]
    lines = [f"# {benchmark.about}", "", *_shape(benchmark, *cases[0]), table(head, rows), ""]
    if timed:
        least = min(row["steps"] for _, case in cases for row in case["rows"].values() if "steps" in row)
        lines += [f"At least {least} steps each{'' if benchmark.variants is no_variants else ', in turns'}.", ""]
    for sizes, case in cases:
        for said in _said(benchmark, sizes, case):
            lines += [f"{benchmark.case(sizes)}: {said}" if several else said, ""]
    return "\n".join([*lines, environment.footer(result["environment"], benchmark.name), ""])


def _shape(benchmark: Benchmark[Any], sizes: Any, case: dict[str, Any]) -> list[str]:
    said = benchmark.shape(sizes, case["rows"])
    return [said, ""] if said else []


def _cells(benchmark: Benchmark[Any], rows: Rows, timed: bool) -> list[list[object]]:
    """A line of cells for each variant."""
    names = ("median", "p20", "p80") if timed else ()
    times = {
        variant: [format(row[name], benchmark.clock.form) if name in row else "" for name in names]
        for variant, row in rows.items()
    }
    return [
        [variant, *times[variant], *(column.cell(row, rows) for column in benchmark.columns)]
        for variant, row in rows.items()
    ]


def _said(benchmark: Benchmark[Any], sizes: Any, case: dict[str, Any]) -> list[str]:
    """What is to be said of a case beside its table: a paragraph each."""
    rows = case["rows"]
    reached = [(goal, goal.reached(rows)) for goal in benchmark.goals(sizes)]
    goals = [f"{goal}; it is {one[1]}, {'met' if one[0] else 'NOT met'}." for goal, one in reached if one is not None]
    checked = [f"Checked first: {case['checked']}."] if case["checked"] else []
    return [*checked, *benchmark.said(sizes, rows), *(f"Goal: {goal}" for goal in goals)]
