"""What a predicted step leaves behind that no step ends: tensors in a list, a hook, or in circles of references; and
what it counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ckptfused.cost import OpenLedger
from ckptfused.sizes import size
from ckptfused.state.containers import Plain

MOST_GROWTH = 1e-6
"""What each step may leave behind beside a model, as a share of its weights: numbers that somebody writes down. 10,000
steps of that are the hundredth that a plan leaves free."""


_Tables = Mapping[Any, tuple[Tensor, Tensor]]
QUIET = 3
"""Steps in a row that leave no more than was there before, and need no more, after which none is expected to."""
MOST_IN_A_ROW = 6
"""Steps that are predicted one after the other, where each leaves more behind, or needs more: what they fill may be
full then."""


class Quieted(NamedTuple):
    """What steps one after the other, each of which begins with what the one before has left, come to."""

    grown: int
    """Bytes by which one of the last left more behind than all before it; 0 if none did."""
    risen: int
    """Bytes by which one of the last needed more than all before it; 0 if none did."""
    highest: int
    """Which step needed the most, by its place: the first, if none left anything and all needed the same."""
    varied: bool
    """Whether they needed different amounts."""
    counter: str
    """The first attribute that counts steps; "" if none does, or one was taken alone."""

    def counted(self) -> list[str]:
        """What to say where a model counts."""
        return [f"{self.counter} counts steps: what later ones do is not predicted"] if self.counter else []

    def said(self) -> list[str]:
        """What to say where each step leaves more behind, or needs more."""
        if self.grown > 0:
            where = "in a list, a hook or a circle of references"
            return [
                f"each step leaves {size(self.grown)} more behind, {where}: later steps need more than is said here"
            ]
        more = (
            f"steps need more the later they are, by {size(self.risen)} and on: later ones need more than is said here"
        )
        return [more] if self.risen > 0 else []


def steps_until_quiet(
    take: Callable[[], object], model: nn.Module, opened: OpenLedger, tables: _Tables, quiet: int
) -> Quieted:
    """Has steps taken until so many in a row leave no more behind than those before, and need no more. Python's
    collector may be late in a step, and takes nothing here.
    """
    growths: list[int] = []
    rises: list[int] = []
    peaks: list[int] = []
    numbers = [_whole_numbers(model)]
    most = 0
    with _without_collector():
        while len(growths) < quiet or (any((*growths[-quiet:], *rises[-quiet:])) and len(growths) < MOST_IN_A_ROW):
            begin = len(opened)
            take()
            numbers.append(_whole_numbers(model))
            left = _bytes_alive(opened, tables)
            growths.append(max(left - most, 0))
            peak = _peak(opened, tables, begin)
            rises.append(max(peak - max(peaks, default=peak), 0))
            peaks.append(peak)
            most = max(left, most)
    highest = max(range(len(peaks)), key=lambda place: (peaks[place], place if most else -place))
    counter = "" if len(peaks) == 1 else next(_counting(*numbers[-3:]), "")
    return Quieted(max(growths[-quiet:]), max(rises[-quiet:]), highest, max(peaks) > min(peaks), counter)


def _whole_numbers(model: nn.Module) -> dict[str, int]:
    """Attributes of modules, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _counting(first: dict[str, int], second: dict[str, int], third: dict[str, int]) -> Iterator[str]:
    """The numbers that grew twice, by as much."""
    for name in third:
        if name in first and name in second and third[name] - second[name] == second[name] - first[name] > 0:
            yield name


def _peak(opened: OpenLedger, tables: _Tables, begin: int) -> int:
    """The most bytes that are there at a time from this event on, beside the tables of the process."""
    shared = {opened.number_of(t) for pair in tables.values() for t in pair}
    now = most = 0
    for place, (kind, _, _, found, *_) in enumerate(opened.ledger.events):
        if kind in ("allocation", "release") and found[0] not in shared:
            now += found[1] if kind == "allocation" else -found[1]
        most = max(most, now) if place >= begin else 0
    return most


def _bytes_alive(opened: OpenLedger, tables: _Tables) -> int:
    """Bytes that are there at the end of a step, all gradients of the model having been released. tables: those of the
    process, which do not count.
    """
    kept: dict[int, int] = {}
    shared = {opened.number_of(t) for pair in tables.values() for t in pair}
    for kind, _, _, (number, count, *_), *_ in opened.ledger.events:
        if kind == "allocation":
            kept[number] = count
        elif kind == "release":
            kept.pop(number, None)
    return sum(count for number, count in kept.items() if number not in shared)


@contextmanager
def numbers_put_back(model: nn.Module) -> Iterator[None]:
    """A context in which what a model counts in its attributes, steps say, begins where it does in the next one."""
    numbers = Plain([*model.modules()])
    try:
        yield
    finally:
        numbers.put(numbers.found)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A context in which what stands in circles of references stays, as it may in a step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
