"""A forward that runs to be looked at leaves nothing behind, and what changes by itself meanwhile is not its doing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest
import torch
from torch import Tensor, nn

from ckptfused.state.undone import without_trace

ALIVE: dict[str, Any] = {}
"""What the forward below reads, by the name of its kind."""
WEAK: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "keys": (WeakKeyDictionary, lambda held, one: held.__setitem__(one, 1)),
    "values": (WeakValueDictionary, lambda held, one: held.__setitem__(1, one)),
    "set": (WeakSet, lambda held, one: held.add(one)),
}


class Reads(nn.Module):
    """A layer that reads a collection, and in whose forward Python's collector runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return self.inner(x) * (1 + 0 * len(ALIVE[self.kind]))


@pytest.mark.parametrize("kind", WEAK)
def test_what_is_collected_meanwhile_is_no_trace(kind: str) -> None:
    make, put = WEAK[kind]
    held, layer = make(), Reads(kind)
    ALIVE[kind] = held
    gc.disable()
    try:
        other = nn.Linear(1, 1)
        other.itself = [other]  # type: ignore[assignment]
        put(held, other)
        del other
        assert len(held) == 1
        with without_trace(layer) as left:
            layer(torch.ones(2, 4))
            assert not held
    finally:
        gc.enable()
    assert left == [] and not held and not [*getattr(held, "data", ())]


def test_what_a_forward_puts_into_a_plain_dict_is_taken_out() -> None:
    noted = ALIVE["plain"] = {}

    class Notes(Reads):
        def forward(self, x: Tensor) -> Tensor:
            ALIVE[self.kind][len(noted)] = x
            return x

    layer = Notes("plain")
    with without_trace(layer) as left:
        layer(torch.ones(2, 4))
    assert left == ["a dict"] and not noted
