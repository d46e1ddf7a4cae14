"""What later steps need that the first does not: what one leaves behind that no step ends (tensors in a list, a hook,
or in circles of references), and what a model does once it has counted so many."""

from __future__ import annotations

import gc
import itertools
import sys
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
LATER = 2_520_000
"""Number of a step that is tried where a model counts them, with the one after it: few warm-ups are as long, and what
happens every so many steps, at most ten or a power of ten up to 10,000, happens in it."""


class Counter(NamedTuple):
    """An attribute of a module that is a whole number."""

    path: str
    held: dict[str, Any]
    name: str
    by: int
    """What it was, or by how much a step raises it."""

    def set_late(self) -> None:
        """Has the next step be the one with that number."""
        self.held[self.name] = LATER - self.by

    def now(self) -> int:
        """What it is."""
        return found if type(found := self.held.get(self.name)) is int else -sys.maxsize


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
    peak: int
    """Bytes that were there in the highest, at most."""
    counters: tuple[Counter, ...] = ()
    """What the model counted in the last step, if it was not the only one."""
    longer: bool = False
    """Whether each step did more than the one before: a much later one could take for ever."""

    def with_later(self, later: Quieted) -> Quieted:
        """What they and much later ones come to."""
        most = self if later.peak <= self.peak else later
        return most._replace(
            grown=max(self.grown, later.grown),
            risen=max(self.risen, later.risen),
            varied=self.varied or later.varied or self.peak != later.peak,
            counters=self.counters,
        )

    def counted(self) -> list[str]:
        """What to say where a model counts."""
        tried = "none was" if self.longer else f"{LATER:,} and {LATER + 1:,} alone were"
        return [f"{one.path} counts steps: of later ones {tried} looked at" for one in self.counters[:1]]

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
    events: list[int] = []
    most = 0
    with _without_collector():
        while len(growths) < quiet or (any((*growths[-quiet:], *rises[-quiet:])) and len(growths) < MOST_IN_A_ROW):
            begin, before = len(opened), _whole_numbers(model)
            take()
            counters = tuple(one._replace(by=one.now() - one.by) for one in before if one.now() > one.by)
            events.append(len(opened) - begin)
            left = _bytes_alive(opened, tables)
            growths.append(max(left - most, 0))
            peak = _peak(opened, tables, begin)
            rises.append(max(peak - max(peaks, default=peak), 0))
            peaks.append(peak)
            most = max(left, most)
    highest = max(range(len(peaks)), key=lambda place: (peaks[place], place if most else -place))
    longer = all(before < after for before, after in itertools.pairwise(events))
    found = Quieted(max(growths[-quiet:]), max(rises[-quiet:]), highest, max(peaks) > min(peaks), max(peaks))
    return found if len(peaks) == 1 else found._replace(counters=counters, longer=longer)


def _whole_numbers(model: nn.Module) -> list[Counter]:
    return [
        Counter(f"{prefix}.{name}".lstrip("."), vars(module), name, value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    ]


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
