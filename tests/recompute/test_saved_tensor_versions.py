"""What a function changes in place after autograd has saved it: right where it is not read again, else it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from ckptfused import FusedCheckpointFFN, FusedCheckpointSequential
from ckptfused.checkpoint import checkpoint, checkpoint_sequential

torchs = partial(torch_checkpoint, use_reentrant=False)
MESSAGE = "one of the variables needed for gradient computation has been modified by an inplace operation"


def changed(x: Tensor) -> Tensor:
    return x.tanh().add_(1).sin()


class Changed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return changed(x)


class Running(nn.Module):
    """Multiplies by a mean that it then moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mean
        self.mean.mul_(0.5)
        return y.sin()


def converted(x: Tensor) -> Tensor:
    layer = nn.TransformerEncoderLayer(4, 1, 8, 0.0, changed, batch_first=True)
    model = nn.Sequential(layer)
    assert ckptfused.convert(model).fused == 0
    return model(x)


def with_gradient_inside(x: Tensor) -> Tensor:
    y = x.tanh()
    z = y.sin()
    y.add_(1)
    (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return z * g


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "checkpoint": lambda x: checkpoint(changed, x),
    "late-stop": lambda x: checkpoint(lambda x: x.tanh().add_(1), x, early_stop=False),
    "module": lambda x: checkpoint(Changed(), x),
    "buffer": lambda x: checkpoint(Running(), x),
    "saved-twice": lambda x: checkpoint(lambda x: (y := x.tanh(), y * y, y.add_(1), y.sin())[-1], x),
    "nested": lambda x: checkpoint(lambda x: checkpoint(changed, x.sin()), x),
    "within-torchs": lambda x: torchs(lambda x: checkpoint(changed, x.sin()), x),
    "argument-of-an-inner-one": lambda x: checkpoint(
        lambda x: (y := x.sin(), z := torchs(torch.exp, y), y.add_(1), z.sin())[-1], x
    ),
    "sequential": lambda x: checkpoint_sequential(nn.Sequential(Changed(), nn.Tanh()), 2, x),
    "between-blocks": lambda x: FusedCheckpointSequential(FusedCheckpointFFN(4, 8, 0.0), Changed())(x),
    "activation": lambda x: FusedCheckpointFFN(4, 8, 0.0, changed)(x),
    "converted": converted,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_raises(name: str) -> None:
    x = torch.randn(2, 3, 4).requires_grad_()
    y = FUNCTIONS[name](x)
    with pytest.raises(RuntimeError, match=MESSAGE):
        y.sum().backward()


def test_each_backward_raises() -> None:
    x = torch.randn(4).requires_grad_()
    y = checkpoint(changed, x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"FloatTensor \[4\].* is at version 1; expected version 0 instead"):
            y.sum().backward(retain_graph=True)


def test_torchs_says_nothing() -> None:
    x = torch.randn(4).requires_grad_()
    torchs(changed, x).sum().backward()
    assert x.grad is not None and not torch.allclose(x.grad, (x.tanh() + 1).cos() * (1 - x.tanh() ** 2))


def test_a_backward_within_the_function_sees_it_too() -> None:
    x = torch.randn(4).requires_grad_()
    with pytest.raises(RuntimeError, match=MESSAGE):
        checkpoint(with_gradient_inside, x).sum().backward()


RIGHT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "after-the-last-saved": (lambda x: x.sin().tanh().add_(1), lambda x: x.sin().tanh() + 1),
    "its-own-result": (lambda x: x.exp().mul(2).add_(1).sin(), lambda x: (x.exp() * 2 + 1).sin()),
    "argument": (lambda x: (x.sin(), x.add_(1).cos())[0] * x, lambda x: x.sin() * (x + 1)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name: str) -> None:
    function, expected = RIGHT[name]
    x = torch.randn(4).requires_grad_()
    found = [torch.autograd.grad(f(x).sum(), x)[0] for f in (partial(checkpoint, function), expected)]
    torch.testing.assert_close(*found)
