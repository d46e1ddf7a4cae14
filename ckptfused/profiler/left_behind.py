"""What a predicted step leaves behind that no step ends: tensors in a list, a hook, or in circles of references."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ckptfused.cost import OpenLedger
from ckptfused.sizes import size
from ckptfused.state.containers import Plain

MOST_GROWTH = 1e-6
"""What each step may leave behind beside a model, as a share of its weights: numbers that somebody writes down. 10,000
steps of that are the hundredth that a plan leaves free."""


_Tables = Mapping[Any, tuple[Tensor, Tensor]]
QUIET = 3
"""Steps in a row that leave no more than was there before, after which none is expected to."""
MOST_IN_A_ROW = 6
"""Steps that are predicted one after the other, where each leaves more behind: what they fill may be full then."""


def steps_until_quiet(take: Callable[[], object], opened: OpenLedger, tables: _Tables, quiet: int) -> tuple[int, int]:
    """Has steps taken, each of which begins with what the one before has left, until so many in a row leave no more
    behind. It returns the bytes by which one of the last grew the rest, 0 if none did; and which step needed the most,
    by its place: the first, if none left anything. Python's collector may be late in a step, and takes nothing here.
    """
    growths: list[int] = []
    peaks: list[int] = []
    most = 0
    with _without_collector():
        while len(growths) < quiet or (any(growths[-quiet:]) and len(growths) < MOST_IN_A_ROW):
            begin = len(opened)
            take()
            left = _bytes_alive(opened, tables)
            growths.append(max(left - most, 0))
            peaks.append(_peak(opened, begin))
            most = max(left, most)
    highest = max(range(len(peaks)), key=lambda place: (peaks[place], place))
    return max(growths[-quiet:]), highest if most else 0


def _peak(opened: OpenLedger, begin: int) -> int:
    """The most bytes that are there at a time from this event on."""
    now = most = 0
    for place, (kind, _, _, found, *_) in enumerate(opened.ledger.events):
        now += found[1] if kind == "allocation" else -found[1] if kind == "release" else 0
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


def grows_by(count: int) -> list[str]:
    """What to say where each step leaves so many bytes more behind."""
    if count <= 0:
        return []
    where = "in a list, a hook or a circle of references"
    return [f"each step leaves {size(count)} more behind, {where}: later steps need more than is said here"]
