"""What a predicted step leaves behind that no step ends: tensors in a list, a hook, or in circles of references."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ckptfused.cost import OpenLedger
from ckptfused.sizes import size

MOST_GROWTH = 1e-6
"""What each step may leave behind beside a model, as a share of its weights: numbers that somebody writes down. 10,000
steps of that are the hundredth that a plan leaves free."""


def bytes_alive(opened: OpenLedger, tables: Mapping[Any, tuple[Tensor, Tensor]]) -> int:
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
def without_collector() -> Iterator[None]:
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
