"""Wherever a segment runs generically, its replay is guarded and finds what its forward found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential


class Segment(nn.Module):
    """A layer that no adapter knows: dropout, an exponential mean that it writes, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x + self.dropout((self.inner(x) - self.mean).tanh())


def softsign(x: Tensor) -> Tensor:
    return nn.functional.softsign(x)


def hooked(block: Any, layer: Callable[[Any], nn.Module]) -> Any:
    layer(block).register_forward_hook(lambda module, args, y: None)
    return block


def converted(make: Callable[[], nn.Module]) -> nn.Module:
    model = nn.Sequential(nn.ModuleList([make(), make()])[0], make())
    assert {layer.path for layer in ckptfused.convert(model).layers} == {"generic"}
    return model


ENTRIES: dict[str, Callable[[], nn.Module]] = {
    "block-activation": lambda: FusedCheckpointBlock(8, 2, 16, activation=softsign),
    "block-hook": lambda: hooked(FusedCheckpointBlock(8, 2, 16), lambda b: b.linear1),
    "attention-hook": lambda: hooked(FusedCheckpointAttention(8, 2), lambda b: b.self_attn.out_proj),
    "ffn-activation": lambda: FusedCheckpointFFN(8, 16, activation=softsign),
    "sequential": lambda: FusedCheckpointSequential(
        FusedCheckpointBlock(8, 2, 16, activation=softsign), FusedCheckpointFFN(8, 16, activation=softsign)
    ),
    "converted": lambda: converted(Segment),
    "converted-hook": lambda: converted(
        lambda: hooked(nn.TransformerEncoderLayer(8, 2, 16), lambda layer: layer.linear1)
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_changed_parameter_raises(name: str) -> None:
    module = ENTRIES[name]()
    x = torch.randn(3, 2, 8).requires_grad_()
    y = module(x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="parameter '.*' of .* was changed in place between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("change", ["eval", "rate"])
@pytest.mark.parametrize("name", ENTRIES)
def test_the_replay_has_the_modes_of_its_forward(name: str, change: str) -> None:
    torch.manual_seed(1)
    module, x = ENTRIES[name](), torch.randn(3, 2, 8).requires_grad_()
    gradients = []
    for changed in (False, True):
        twin = copy.deepcopy(module)
        torch.manual_seed(2)
        y = twin(x)
        if changed and change == "eval":
            twin.eval()
        elif changed:
            for inner in twin.modules():
                if isinstance(inner, nn.Dropout):
                    inner.p = 0.8
        gradients.append(torch.autograd.grad(y.sin().sum(), [x, *twin.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_buffers_that_a_converted_layer_writes_are_written_once() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Segment(), Segment())
    model, x = copy.deepcopy(plain), torch.randn(3, 2, 8).requires_grad_()
    ckptfused.convert(model)
    found = []
    for one in (plain, model):
        torch.manual_seed(2)
        for _ in range(3):
            one.zero_grad()
            (gradient,) = torch.autograd.grad(one(x).sin().sum(), x)
        found.append([gradient, *one.buffers(), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_checkpoint_sequential_replays_what_it_found() -> None:
    found = []
    for call in (lambda f, x: f(x), partial(_in_segments, segments=2), partial(_in_segments, segments=3)):
        torch.manual_seed(1)
        steps, x = nn.Sequential(*(Segment() for _ in range(3))), torch.randn(3, 2, 8).requires_grad_()
        loss = call(steps, x).sin().sum()
        steps.eval()
        found.append([*torch.autograd.grad(loss, [x, *steps.parameters()]), *steps.buffers()])
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


def _in_segments(steps: nn.Sequential, x: Tensor, segments: int) -> Tensor:
    return ckptfused.checkpoint_sequential(steps, segments, x)
