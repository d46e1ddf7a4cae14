"""`convert` runs nothing of a model's, and what its report counts leaves no trace."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.models.describe.counts import Counts
from ckptfused.state.generators import state_of
from tests.cases import by_turns

WIDTH = 16
LOSSES: list[Tensor] = []
LAST: dict[str, Any] = {"value": None}
CALLS = 0


class Layer(nn.Module):
    """A layer, within whose forward something else happens."""

    seen: tuple[Any, ...] = ()
    everywhere: list[Any] = []  # noqa: RUF012 - as people write it

    def __init__(self, beside: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.act, self.beside = nn.Linear(WIDTH, WIDTH), nn.Tanh(), beside
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.notes = SimpleNamespace(last=None, all=[])

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.inner(x))
        self.beside(self, x)
        return x


def counts(layer: Any, x: Tensor) -> None:
    global CALLS
    CALLS += 1


def notes(layer: Any, x: Tensor) -> None:
    layer.notes.last = x
    layer.notes.all.append(x)


def on_class(layer: Any, x: Tensor) -> None:
    type(layer).seen = (*type(layer).seen, x)
    type(layer).everywhere.append(x)


class Elsewhere:
    """A class of which no layer is."""

    losses: ClassVar[list[Any]] = []


STATE = types.ModuleType("state")
STATE.losses = []  # type: ignore[attr-defined]
LONG: list[Any] = [0.0] * 300


BESIDE: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "a global list": (lambda layer, x: LOSSES.append(x.mean()), lambda layer: list(LOSSES)),
    "a global dict": (lambda layer, x: LAST.update(value=x), lambda layer: LAST["value"]),
    "a global number": (counts, lambda layer: CALLS),
    "an object": (notes, lambda layer: (layer.notes.last, list(layer.notes.all))),
    "a class": (on_class, lambda layer: (Layer.seen, list(Layer.everywhere))),
    "Python's generator": (lambda layer, x: random.random(), lambda layer: random.getstate()),
    "NumPy's generator": (lambda layer, x: np.random.rand(), lambda layer: str(np.random.get_state())),
    "PyTorch's generator": (lambda layer, x: torch.manual_seed(3), lambda layer: torch.get_rng_state().tolist()),
    "a generator of Python's": (lambda layer, x: layer.python.random(), lambda layer: layer.python.getstate()),
    "a generator of NumPy's": (lambda layer, x: layer.numpy.random(), lambda layer: state_of(layer.numpy)),
    "another class": (lambda layer, x: Elsewhere.losses.append(x.mean()), lambda layer: list(Elsewhere.losses)),
    "an imported module": (lambda layer, x: STATE.losses.append(x.mean()), lambda layer: list(STATE.losses)),
    "a long list": (lambda layer, x: LONG.append(x.mean()), lambda layer: list(LONG)),
}


def model(beside: Callable[[Any, Tensor], Any] = lambda *_: None) -> nn.ModuleList:
    return nn.ModuleList(Layer(beside) for _ in range(2))


def converted(layers: nn.ModuleList) -> None:
    assert ckptfused.convert(layers).layers


def asked(layers: nn.ModuleList) -> None:
    assert "not counted" not in str(ckptfused.convert(layers))


def predicted(layers: nn.ModuleList) -> None:
    notes = ckptfused.profile(nn.Sequential(*layers), torch.ones(2, WIDTH), device="cpu").notes
    assert all("each step leaves" in note for note in notes)


def budgeted(layers: nn.ModuleList) -> None:
    try:
        ckptfused.convert(nn.Sequential(*layers), budget="1GiB", batch=torch.ones(2, WIDTH))
    except ValueError as error:  # what is longer after each step has no budget
        if "each step leaves" not in str(error):
            raise


@pytest.mark.parametrize(("what", "way"), by_turns(BESIDE, [converted, asked, predicted, budgeted]))
def test_nothing_is_left(what: str, way: Callable[[nn.ModuleList], None]) -> None:
    beside, read = BESIDE[what]
    layers = model(beside)
    for layer in layers:
        before = read(layer)
        way(layers)
        assert read(layer) == before


def test_the_first_step_after_a_report() -> None:
    """The model has a list of losses that layers fill, as mixtures of experts have them."""
    layers = model(lambda layer, x: LOSSES.append(x.square().mean()))
    mine = torch.ones((), requires_grad=True) * 2
    LOSSES[:] = [mine]
    try:
        print(ckptfused.convert(layers))
        assert LOSSES[0] is mine and len(LOSSES) == 1
        x = torch.randn(3, WIDTH, requires_grad=True)
        for layer in layers:
            x = layer(x)
        (x.sum() + torch.stack(LOSSES).sum()).backward()
    finally:
        LOSSES.clear()


def test_convert_runs_nothing() -> None:
    calls = itertools.count()
    report = ckptfused.convert(model(lambda layer, x: next(calls)))
    assert [layer.path for layer in report.layers] == ["generic"] * 2 and report.fused == 0 and next(calls) == 0


def test_a_planner_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs each policy, and looks at predicted steps alone."""
    counted: list[Any] = []
    monkeypatch.setattr(Counts, "of", lambda *given: counted.append(given))
    ckptfused.plan(nn.Sequential(*model()), torch.ones(2, WIDTH), "1GiB")
    assert not counted
    ckptfused.convert(model())
    assert len(counted) == 2


def test_what_tells_other_threads_stays() -> None:
    """They may have seen it."""
    told = threading.Event()
    asked(model(lambda layer, x: told.set()))
    assert told.is_set()


@pytest.mark.parametrize("stream", [itertools.count(), iter(range(9)), (i for i in range(9)), queue.Queue[int]()])
def test_what_nobody_can_put_back_is_not_begun(stream: Any) -> None:
    """What a forward takes from an iterator, or puts in a queue, stays so: no such layer is counted."""
    is_queue = isinstance(stream, queue.Queue)
    layers = model(lambda layer, x: stream.put(1) if is_queue else next(stream))
    report = ckptfused.convert(layers)
    assert "not counted" in str(report) and {layer.before for layer in report.layers} == {None}
    assert stream.empty() if is_queue else next(stream) == 0


def test_reports_are_of_the_layers_as_they_were() -> None:
    """Whatever became of them since, and without holding them."""
    layers: Any = model()
    want = [layer.before for layer in ckptfused.convert(layers).layers]
    report, weight = ckptfused.convert(layers), weakref.ref(layers[0].inner.weight)
    layers.double()
    ckptfused.revert(layers)
    layers[1].act = nn.ReLU()
    del layers
    gc.collect()
    assert weight() is None
    assert [layer.before for layer in report.layers] == want and None not in want


@pytest.mark.parametrize(
    "within",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_who_asks_does_not_matter(within: Callable[[], Any]) -> None:
    want = str(ckptfused.convert(model()))
    with within():
        assert str(ckptfused.convert(model())) == want and "→" in want


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))])
def test_copies_of_a_report(copied: Callable[[Any], Any]) -> None:
    report = copied(ckptfused.convert(model()))
    again = ckptfused.convert(model())
    assert report == again and hash(report.layers[0]) == hash(again.layers[0]) and repr(report) == repr(again)
    assert report.layers[0].before > report.layers[0].after == 4 * WIDTH
