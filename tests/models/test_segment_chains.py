"""Chains of calls in models that were written for it: what happens between layers, state, failures, other machinery."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused import CheckpointPolicy
from tests.accounting import saved_bytes
from tests.models.compare import equal, gradients, result
from tests.models.small import segmented
from tests.models.zoo import randomize


class Between(nn.Module):
    """A loop that does something between its layers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        randomize(self)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = self.change(x)
        return x

    def change(self, x: Tensor) -> Tensor:
        if self.what == "new":
            return x * 2
        if self.what == "in place":
            return x.mul_(2)
        if self.what == "a view":
            return x[:, :-1]
        if self.what == "of no graph":
            return x.detach()
        assert self.what == "nothing"
        return x.view_as(x)


@pytest.mark.parametrize("what", ["new", "in place", "a view", "of no graph", "nothing"])
def test_a_segment_ends_where_the_model_does_something(what: str) -> None:
    model, x = Between(what), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def take() -> dict[str, Tensor]:
        torch.manual_seed(2)
        x.grad = None
        return {**result(model, x), **({} if x.grad is None else {"x": x.grad.clone()})}

    ckptfused.convert(model)
    wanted = take()
    segmented(model)
    divided = what in ("new", "in place", "a view")
    said = pytest.warns(UserWarning, match=r"layers.0 … layers.3 is divided before layers.2")
    with said if divided else contextlib.nullcontext():
        got = take()
    equal(got, wanted)
    equal(take(), wanted)  # and says it once


class Shared(nn.Module):
    """One layer, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)])
        randomize(self)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layers[0](x)
        return x


def test_a_layer_that_is_called_several_times() -> None:
    """It is one segment with itself."""
    model, x = Shared(), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ckptfused.convert(model)
    torch.manual_seed(2)
    wanted = result(model, x)
    assert saved_bytes(lambda: model(x), model) == 4 * (x.nbytes + 16)
    segmented(model)
    torch.manual_seed(2)
    equal(result(model, x), wanted)
    assert saved_bytes(lambda: model(x), model) == x.nbytes


def _draw(*_: Any) -> None:
    torch.rand(3)


class Residual(nn.Module):
    """Statistics, dropout from PyTorch, and a module that writes to its input first."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(first, nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) + x.mean()


@pytest.mark.parametrize("keep", ["inputs", None])
@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Tanh()])
def test_layers_without_an_adapter(first: nn.Module, keep: str | None) -> None:
    """Statistics are updated once, dropout draws the same, the caller's x stays as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(copy.deepcopy(first)) for _ in range(4)))
    x = torch.randn(4, 6, 8, requires_grad=True)

    def take(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(2)
        given = x * 1
        before, x.grad = given.detach().clone(), None
        found = result(model, given)
        assert torch.equal(given, before) and all(layer.calls == 1 for layer in model)
        assert x.grad is not None
        return {**found, **{name: b.clone() for name, b in model.named_buffers()}, "x": x.grad}

    alone = copy.deepcopy(model)
    ckptfused.convert(alone)
    wanted = take(alone)
    for policy in (CheckpointPolicy.whole_model(keep), CheckpointPolicy.segments(2, keep)):
        other = segmented(copy.deepcopy(model), policy)
        equal(take(other), wanted)
        assert saved_bytes(lambda other=other: other(x * 1), other) == policy.segment_count * x.nbytes  # type: ignore[operator]


def test_others_draw_between_layers() -> None:
    """A replay of a layer draws what its forward drew, and leaves the generator as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(nn.Tanh()) for _ in range(3)))
    for layer in model:
        layer.register_forward_hook(_draw)
    x = torch.randn(4, 6, 8, requires_grad=True)

    def take(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(2)
        found = result(model, x)
        return {**found, "next": torch.rand(2)}

    alone = copy.deepcopy(model)
    ckptfused.convert(alone)
    equal(take(segmented(model)), take(alone))


def test_what_was_changed_raises() -> None:
    """A parameter of any layer, the input, an argument beside it."""
    model, mask = Between("nothing"), torch.zeros(5, 5)
    segmented(model)
    for changed in (model.layers[1].linear1.weight, model.layers[3].norm2.bias):  # type: ignore[union-attr]
        y = model(torch.ones(2, 5, 16))
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace"):
            y.sum().backward()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = segmented(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    x = torch.ones(2, 5, 16)
    for t in (x, mask):
        y = encoder(x, mask)
        t.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()


def test_a_failed_call_ends_the_segment() -> None:
    model, x = Between("nothing"), torch.ones(2, 5, 16)
    segmented(model)
    y = model.layers[0](x)
    with pytest.raises(Exception):  # noqa: B017
        model.layers[1](y, torch.zeros(7, 3))
    with pytest.warns(UserWarning, match=r"divided before layers\.1"):
        model.layers[1](y).sum().backward()


def test_within_another_checkpoint() -> None:
    model = Between("nothing")
    x = torch.randn(2, 5, 16, requires_grad=True)
    segmented(model, CheckpointPolicy.segments(2))
    torch.manual_seed(2)
    wanted = result(model, x)
    torch.manual_seed(2)
    model.zero_grad()
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    y.pow(3).mean().backward()
    equal({"y": y.detach(), **gradients(model)}, wanted)


def test_lent_weights() -> None:
    """`functional_call`: a replay would find other weights, so the layers run as they were."""
    model, x = Between("nothing"), torch.ones(2, 5, 16)
    other = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    for p in other.values():
        p.requires_grad_()

    def take() -> list[Tensor]:
        torch.manual_seed(2)
        y = torch.func.functional_call(model.eval(), other, (x,))
        return list(torch.autograd.grad(y.pow(3).mean(), list(other.values())))

    wanted = take()
    segmented(model)
    with pytest.warns(UserWarning, match=r"layers\.0 has other weights in a replay"):
        got = take()
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)


def test_a_second_derivative() -> None:
    model, x = Between("nothing").double().eval(), torch.randn(1, 3, 16, dtype=torch.double, requires_grad=True)

    def penalty() -> Tensor:
        (dx,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), x)[0]

    ckptfused.convert(model)
    wanted = penalty()
    segmented(model)
    torch.testing.assert_close(penalty(), wanted)


@contextlib.contextmanager
def compiled(model: Any) -> Iterator[Any]:
    torch.compiler.reset()
    yield torch.compile(model, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_layers_are_each_for_themselves() -> None:
    model, x = Between("nothing").eval(), torch.randn(2, 5, 16)
    ckptfused.convert(model)
    wanted = result(model, x)
    segmented(model)
    with compiled(model) as other:
        model.zero_grad()
        other(x).pow(3).mean().backward()
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, wanted[name])


class Late(nn.Module):
    """A layer that writes a buffer at each third call, and notes what it computed."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(1 << 15))
        self.writes, self.calls = writes, 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.linear(x).tanh()
        self.seen.append(h)
        if self.writes and self.calls % 3 == 0:
            self.count.add_(1)
        return x + (h * (1 + self.count[0])).tanh()


@pytest.mark.filterwarnings("ignore:ckptfused. the segment of layers .* is divided before")
@pytest.mark.parametrize("place", range(3))
def test_a_buffer_that_is_written_late(place: int) -> None:
    """Nothing was kept of it: backward gets what the call saved, and the segment ends before and after it."""
    torch.manual_seed(0)
    plain: Any = nn.Module()
    plain.layers = nn.ModuleList(Late(i == place) for i in range(3))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted, policy=CheckpointPolicy.segments(1))
    x = torch.randn(4, 16)
    for _ in range(7):
        for model in (plain, converted):
            y = x
            for layer in model.layers:
                y = layer(y)
            y.square().sum().backward()
    for a, b in zip(plain.parameters(), converted.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.layers, converted.layers, strict=True):
        assert torch.equal(a.count, b.count) and a.calls == b.calls == len(b.seen) == 7


def test_a_segment_ends_where_a_buffer_is_written_late() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList(Late(i == 1) for i in range(3))
    ckptfused.convert(model, policy=CheckpointPolicy.segments(1))
    called = functools.partial(functools.reduce, lambda y, layer: layer(y), model.layers)
    called(torch.randn(4, 16))
    called(torch.randn(4, 16))
    with pytest.warns(UserWarning, match="is divided before"):
        called(torch.randn(4, 16))
