"""Steps that change everything a model can change leave no trace of it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.backends import cudnn

from ckptfused.state.snapshot import Unchanged

pytestmark = pytest.mark.once


NAMED = (numpy.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3))


class Books:
    """An object of somebody's own."""

    def __init__(self) -> None:
        self.code, self.count = torch.ones(4), 0


class Restless(nn.Module):
    """A model whose forward changes all that one can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("share", torch.eye(4).to_sparse())
        self.generator = torch.Generator()
        self.books = Books()
        self.count, self.rate = 0, float("nan")
        self.seen: dict[str, Any] = {"all": [1]}
        self.last: deque[int] = deque([1], maxlen=2)
        self.kinds = {1}
        self.children_of = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.rate = self.count / 2
        self.calls = self.calls + 1  # another tensor
        self.seen["all"].append(self.count)
        self.seen["x"] = x
        self.last.append(self.count)
        self.kinds.add(self.count + 1)
        self.later = x
        self.children_of.append(nn.Linear(4, 4))
        self.register_buffer("late", x.detach())
        self.eval()
        self.register_forward_hook(lambda *_: None)
        self.linear.weight.register_hook(lambda grad: grad)
        self.linear.weight.data = self.linear.weight.data * 2
        self.linear.bias = nn.Parameter(self.linear.bias.detach() + 1)
        self.frozen.weight.data.add_(1)
        self.frozen.bias.requires_grad_()
        torch.set_default_dtype(torch.float64)
        cudnn.benchmark = not cudnn.benchmark
        with torch.no_grad():
            x += 1
        self.books.code.add_(1)
        self.books.count += 1
        _ = NAMED[0].random() + NAMED[1].random() + torch.rand(1, generator=NAMED[2])
        noise = random.random() + numpy.random.rand() + torch.rand(4, generator=self.generator)
        return self.norm.train()(self.linear(x) + self.frozen(x) + noise.float()).square().sum()


def test_nothing_is_left_of_a_step() -> None:
    model, x = Restless(), torch.randn(8, 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.linear.bias.grad = None
    before, tensors = state(model, x), held(model)
    with Unchanged(model, x) as unchanged:
        for _ in range(2):
            assert all(p.grad is None for p in model.parameters())
            model(x).backward()
            assert not same(before, state(model, x))
            unchanged.restore()
            written = {id(model.frozen.weight), id(model.linear.weight), id(model.norm.running_mean), id(x)}
            assert unchanged.written >= written and id(model.linear.bias) not in unchanged.written
    assert same(before, state(model, x))
    assert all(a is b for a, b in zip(tensors, held(model), strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("stepped", [False, True])
def test_nothing_is_left_of_an_optimizers_step(kind: Any, stepped: bool) -> None:
    """Neither state that it makes at its first step nor what a schedule reads stays."""
    model = nn.Linear(4, 4)
    options = {torch.optim.AdamW: {"amsgrad": True}, torch.optim.SGD: {"momentum": 0.9}}.get(kind, {})
    optimizer = kind(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    if stepped:
        optimizer.step(closure)
    before, weights = repr(optimizer.state_dict()), model.weight.detach().clone()
    with Unchanged(model, None, optimizer):
        optimizer.step(closure)
        schedule.step()
        assert repr(optimizer.state_dict()) != before
    assert repr(optimizer.state_dict()) == before and torch.equal(weights, model.weight)
    assert len(optimizer.state) == (stepped and (1 if kind is torch.optim.LBFGS else 2))


@pytest.mark.parametrize("stay", [False, True])
def test_hooks_that_step_in_backward(stay: bool) -> None:
    """They run in a step that is measured, and not in one that is compared."""
    model, ran = nn.Linear(2, 2), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(ran.append)
    with Unchanged(model, hooks=stay):
        model(torch.ones(2)).sum().backward()
    assert bool(ran) == stay
    model(torch.ones(2)).sum().backward()
    assert len(ran) == 1 + stay


def test_gradients_in_a_bucket_keep_their_values() -> None:
    model, bucket = nn.Linear(2, 2), torch.ones(6)
    model.weight.grad = bucket[:4].view(2, 2)
    with Unchanged(model):
        bucket.zero_()  # as a reducer does
    assert model.weight.grad.sum() == 4


def held(model: Restless) -> list[Any]:
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]


def state(model: Restless, x: Tensor) -> list[Any]:
    generators = [torch.get_rng_state(), model.generator.get_state(), numpy.random.get_state()[1], random.getstate()]
    generators += [repr(NAMED[0].bit_generator.state), NAMED[1].getstate(), NAMED[2].get_state()]
    values = [model.books.code.clone(), torch.tensor(model.books.count)]
    values += [t.to_dense().clone() for t in (*model.parameters(), *model.buffers(), x)]
    tensors = [(id(p), p.data_ptr(), p.requires_grad, bool(p._backward_hooks)) for p in model.parameters()]
    names = [(name, list(vars(module)), module.training) for name, module in model.named_modules()]
    plain = repr((model.count, model.rate, list(model.seen), model.seen["all"], model.last, model.kinds))
    hooks = len(model._forward_hooks)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    settings = [torch.get_default_dtype(), cudnn.benchmark]
    return [*generators, *values, *tensors, *names, plain, hooks, *grads, *settings]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else bool(numpy.all(x == y)) for x, y in zip(a, b, strict=True)
    )
