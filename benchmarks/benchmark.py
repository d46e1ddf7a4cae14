"""What a benchmark declares: its options, variants, the check before any time, and its page's columns and goals.

`runner.py` does the rest, for all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Step = Callable[[], object]
"""One call of what is timed."""
Steps = Mapping[str, Any]
"""A `Step` by variant; None of one that is timed in its own process."""
Rows = dict[str, dict[str, Any]]
"""Figures by variant."""
T = TypeVar("T")
MIB = 2**20


def option(*values: T, every: bool = True) -> T:
    """A field of sizes that has these values; all of them are cases if none is asked for, or the first one alone."""
    return field(default=values[0], metadata={"values": values, "every": every})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of a benchmark: each field is one, and several values of a field are so many cases."""

    seed: int = 0


S = TypeVar("S", bound=Sizes)


def no_variants(sizes: Sizes) -> Steps:
    """Nothing takes turns: all figures are predicted, or each variant is measured by itself."""
    return {}


@dataclass(frozen=True)
class Clock:
    """What a step's time is read from."""

    unit: str
    now: Callable[[], float]
    form: str
    skipped: float
    """The share of rounds, the first ones, that do not count."""


WALL = Clock("s", time.perf_counter, ".3f", 0.0)
PROCESSOR = Clock("µs", lambda: time.process_time_ns() / 1e3, ".0f", 0.1)
"""Processor time: a busy machine falls on all variants alike."""


@dataclass(frozen=True)
class Column:
    """A column of a page: its title, and a cell's text from a variant's figures and those of all variants."""

    title: str
    cell: Callable[[dict[str, Any], Rows], str]


def number(title: str, figure: str, form: str = ",.1f", unit: float = 1) -> Column:
    """A column of one figure; empty where a variant has none."""
    return Column(title, lambda row, rows: format(row[figure] / unit, form) if row.get(figure) is not None else "")


def mib(title: str, figure: str, form: str = ",.1f") -> Column:
    """A column of bytes in MiB."""
    return number(f"{title}, MiB", figure, form, MIB)


def ratio(title: str, over: str, figure: str = "median") -> Column:
    """A column of ratios to another variant's figure."""

    def cell(row: dict[str, Any], rows: Rows) -> str:
        base = rows.get(over, {})
        return f"{row[figure] / base[figure]:.2f}×" if figure in row and figure in base else ""

    return Column(title, cell)


@dataclass(frozen=True)
class Goal:
    """A figure of one variant over that of another, at most."""

    variant: str
    over: str
    limit: float
    figure: str = "median"
    what: str = "time"

    def reached(self, rows: Rows) -> tuple[bool, str] | None:
        """Whether it is met, and the ratio; None where one of the two was not measured."""
        ours, theirs = (rows.get(name, {}).get(self.figure) for name in (self.variant, self.over))
        if ours is None or theirs is None:
            return None
        return ours <= self.limit * theirs, f"{ours / theirs:.2f}×" if theirs else f"{ours:g} over 0"

    def __str__(self) -> str:
        return f"{self.what} of {self.variant} at most {self.limit:.2f}× that of {self.over}"


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[S]):
    """One measurement. Its name is that of its command."""

    name: str
    doc: str | None
    """The docstring of its module, whose first line says what is measured."""
    sizes: S
    variants: Callable[[S], Steps] = no_variants
    """Makes what takes turns."""
    check: Callable[[S, Steps], str] = lambda sizes, steps: ""
    """Raises `SystemExit` where a variant computes something else; says what was shown."""
    figures: Callable[[S, Steps], Rows] = lambda sizes, steps: {}
    """Measures or predicts what is not time, and adds rows of what is not timed."""
    alone: Callable[[S, str], dict[str, Any]] | None = None
    """Measures more of a variant, in a process of its own. One that returns "refused", and why, is not timed."""
    columns: Sequence[Column] = ()
    goals: Callable[[S], Sequence[Goal]] = lambda sizes: ()
    must_meet: bool = False
    """A goal that is missed makes the command's exit status 1."""
    case: Callable[[S], str] = lambda sizes: ""
    """Names a case among those of one file."""
    stem: Callable[[S], str] | None = None
    """Names a case's file, without what the user adds; by default as the command."""
    shape: Callable[[S, Rows], str] = lambda sizes, rows: ""
    """Says what is measured in this case, before the table."""
    said: Callable[[S, Rows], Sequence[str]] = lambda sizes, rows: ()
    """Says what follows from the figures, and how they are meant."""
    budget: float = 60.0
    """Seconds of timed steps of each case."""
    clock: Clock = WALL
    threads: int | None = None

    @property
    def about(self) -> str:
        """What is measured, in a line."""
        return (self.doc or self.name).splitlines()[0].rstrip(".")

    def file(self, sizes: S) -> str:
        return self.stem(sizes) if self.stem else self.name
