"""What is remembered of a layer holds no tensor that the layer has given up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.calls import MOST_CHANGES, MOST_TRIES
from ckptfused.models.derive.layer_state import KNOWN

C = 16
KEEP: dict[str, Callable[[Any, Tensor], None]] = {
    "an attribute": lambda layer, h: setattr(layer, "last", h),
    "a list": lambda layer, h: setattr(layer, "last", [h]),
    "a tuple": lambda layer, h: setattr(layer, "last", (h, None)),
    "in a dict": lambda layer, h: layer.kept.update(h=h),
    "a buffer": lambda layer, h: layer.register_buffer("seen", h),
    "of a module within": lambda layer, h: setattr(layer.mlp, "last", h),
}


class Layer(nn.Module):
    """A layer that keeps what it made, as those do whose probabilities somebody wants to look at."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(C), nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))
        self.keep, self.kept, self.made = keep, dict[str, Tensor](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        kept = h.detach()
        REFS.append(weakref.ref(kept))
        self.keep(self, kept)
        return x + h


REFS: list[weakref.ref[Tensor]] = []


@pytest.mark.parametrize("what", KEEP)
def test_what_a_layer_gave_up_ends(what: str) -> None:
    model = nn.Sequential(*(Layer(KEEP[what]) for _ in range(2)))
    ckptfused.convert(model)
    REFS.clear()
    x = torch.randn(2, 4, C)
    for step in range(MOST_CHANGES + 3):
        model(x).sum().backward()
        if step in (1, MOST_TRIES + 2, MOST_CHANGES + 2):
            gc.collect()
            alive = sum(ref() is not None for ref in REFS)
            assert alive <= (2 if what not in ("a list", "a tuple") else 4), (what, step)  # those, or one step's more


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.sizes = nn.LayerNorm(C), nn.Linear(C, C), [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).tanh() * len(self.sizes)


def test_states_that_come_again_stay_known() -> None:
    """A layer that changes between training and evaluation is read twice, and once for a list that is another."""
    layer = Plain()
    model = nn.Sequential(layer, Plain())
    ckptfused.convert(model)
    x = torch.randn(2, 4, C)
    for _ in range(MOST_TRIES + 2):
        model.train()(x).sum().backward()
        model.eval()(x).sum().backward()
    assert vars(layer)[KNOWN].changes == len(vars(layer)[KNOWN].seen) == 2
    layer.sizes = [1, 2, 3]
    model(x).sum().backward()
    assert vars(layer)[KNOWN].changes == 3 and len(vars(layer)[KNOWN].seen) == 1


class Refused(nn.Module):
    """A layer that is read, and in the end not taken: `last` says why."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def _decides(h: Tensor) -> Tensor:
    return h if h.sum() > 0 else 2 * h


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "it decides by a value": _decides,
    "a call that no rule takes": lambda h: h.cumsum(1),
    "not finite": lambda h: h / 0,
    "it raises at another size": lambda h: h + torch.ones(2, 4, 1),
    "another result": lambda h: h * (1.0 if h.size(1) == 5 else 2.0),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_reading_that_is_given_up_leaves_no_tensors_to_the_collector(why: str) -> None:
    """Its recordings are circles, and those of a proof have numbers of the size of a layer's."""
    model = nn.Sequential(*(Refused(REFUSED[why]) for _ in range(2)))
    ckptfused.convert(model)
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(2, 4, C)).sum().backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [t for t in gc.garbage if isinstance(t, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left, "nothing was recorded, or nothing is in circles"
    assert [tuple(t.shape) for t in left if not t.is_meta] == []
