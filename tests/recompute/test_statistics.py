"""Running statistics are updated once, by the forward; and where the modules are looked for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ckptfused.checkpoint import checkpoint
from ckptfused.state.reach import reach

torchs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch2d": (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
    "batch3d": (lambda: nn.BatchNorm3d(4), (3, 4, 2, 2, 2)),
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "no-affine": (lambda: nn.BatchNorm1d(4, affine=False), (6, 4)),
    "untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
    "instance": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
    "lazy": (lambda: nn.LazyBatchNorm1d(), (6, 4)),
}


def run(call: Callable[..., Tensor], function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Three steps; the gradient of the last."""
    for step in range(3):
        y = call(function, x * (step + 1))
        (gradient,) = torch.autograd.grad(y.sin().sum(), x)
    return gradient


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_updated_once(name: str, training: bool) -> None:
    make, shape = NORMS[name]
    x = torch.randn(*shape).add(1).requires_grad_()
    norms = []
    for call in (checkpoint, lambda function, x: function(x)):
        torch.manual_seed(1)
        norm = make()
        if name == "lazy":
            norm(x)
        norm.train(training)
        norms.append(norm)
        norms.append(run(call, nn.Sequential(nn.ReLU(inplace=True), norm, nn.Tanh()), x))
    ours, gradient, plain, expected = norms
    assert torch.equal(gradient, expected)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for got, wanted in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["batch1d", "batch2d"])
def test_torch_updates_twice(name: str) -> None:
    make, shape = NORMS[name]
    norm, x = make(), torch.randn(*shape).requires_grad_()
    run(torchs, nn.Sequential(norm, nn.Tanh()), x)
    assert norm.num_batches_tracked == 6


@pytest.mark.parametrize("features", [4, 4096, 100_000])
def test_training_after_evaluation(features: int) -> None:
    """Batch norm's kernel writes behind the version counter, of statistics of any size."""
    x, results = torch.randn(3, features).requires_grad_(), []
    for call in (checkpoint, lambda function, x: function(x)):
        norm, found = nn.BatchNorm1d(features), []
        for training in (False, False, True, True, False, True):
            found.append(run(call, nn.Sequential(norm.train(training), nn.Tanh()), x))
        results.append([*found, *norm.buffers()])
    ours, plain = results
    assert plain[-1] == 9
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_shared_and_nested() -> None:
    x = torch.randn(6, 4).requires_grad_()
    results = []
    for call in (checkpoint, lambda function, x: function(x)):
        norm = nn.BatchNorm1d(4)
        inner = lambda x, norm=norm: norm(x).exp()  # noqa: E731
        results.append(run(call, lambda x, call=call, norm=norm, f=inner: norm(call(f, norm(x)).tanh()).tanh(), x))
        results.extend(norm.buffers())
    half = len(results) // 2
    assert results[half + 3] == 9
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))


def test_the_module_has_its_own_buffers_again() -> None:
    norm, x = nn.BatchNorm1d(4), torch.randn(6, 4).requires_grad_()
    buffers = [(name, id(t), t.data_ptr()) for name, t in norm.named_buffers()]
    calls = itertools.count()

    def fails_in_the_replay(x: Tensor) -> Tensor:
        y = norm(x)
        if next(calls):
            raise ZeroDivisionError
        return y.exp().exp()

    y = checkpoint(fails_in_the_replay, x)
    after = [t.clone() for t in norm.buffers()]
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert [(name, id(t), t.data_ptr()) for name, t in norm.named_buffers()] == buffers
    assert all(torch.equal(a, b) for a, b in zip(after, norm.buffers(), strict=True))


NORM = nn.BatchNorm1d(4)


def _names_a_global(x: Tensor) -> Tensor:
    return NORM(x).exp()


def _calls_what_names_a_global(x: Tensor) -> Tensor:
    return _names_a_global(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"norm": nn.BatchNorm1d(4)})

    def part(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner["norm"](x).exp() * scale

    forward = part


class Holder:
    """No module, but has some."""

    def __init__(self, norm: nn.Module) -> None:
        self.blocks = [{"norm": norm}]

    def __call__(self, x: Tensor) -> Tensor:
        return self.blocks[0]["norm"](x).exp()


def _decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args)

    return wrapper


def _places() -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], nn.Module]]:
    model, norm = Model(), nn.BatchNorm1d(4)
    holder, layers = Holder(norm), [nn.Identity(), norm]
    return {
        "module": (model, (), model.inner["norm"]),
        "method": (model.part, (), model.inner["norm"]),
        "call": (model.__call__, (), model.inner["norm"]),
        "partial": (functools.partial(model.part, scale=2.0), (), model.inner["norm"]),
        "closure": (lambda x: norm(x).exp(), (), norm),
        "closure-self": (lambda x: model.part(x), (), model.inner["norm"]),
        "closure-list": (lambda x: layers[1](x).exp(), (), norm),
        "closure-closure": ((lambda inner: lambda x: inner(x))(lambda x: norm(x).exp()), (), norm),
        "default": (lambda x, norm=norm: norm(x).exp(), (), norm),
        "object": (holder, (), norm),
        "object-method": (holder.__call__, (), norm),
        "closure-object": (lambda x: holder(x), (), norm),
        "decorated": (_decorated(model.part), (), model.inner["norm"]),
        "global": (_names_a_global, (), NORM),
        "global-deeper": (_calls_what_names_a_global, (), NORM),
        "argument": (lambda x, norm: norm(x).exp(), (norm,), norm),
        "argument-list": (lambda x, norms: norms["n"][0](x).exp(), ({"n": [norm]},), norm),
    }


@pytest.mark.parametrize("place", _places())
def test_where_modules_are_found(place: str) -> None:
    function, more, norm = _places()[place]
    x = torch.randn(6, 4).requires_grad_()
    before = int(norm.num_batches_tracked)
    checkpoint(function, x, *more).sum().backward()
    assert norm.num_batches_tracked == before + 1


def test_the_search_ends() -> None:
    holder = Holder(nn.BatchNorm1d(4))
    holder.blocks.append({"holder": holder})  # type: ignore[dict-item]
    many = list(range(10**6))
    assert len(reach([holder, many, torch.exp, torch, print, len, Model]).modules) == 1
