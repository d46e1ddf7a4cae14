"""A replay that waits for nothing but the inputs of a fused call ends before it; any other runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ckptfused
from tests.accounting import CountOps

pytestmark = pytest.mark.each_torch

C = 16
Blocks = list[nn.Module]
torchs = partial(checkpoint, use_reentrant=False)


def blocks(**options: Any) -> Blocks:
    torch.manual_seed(0)
    make = partial(ckptfused.FusedCheckpointBlock, C, 2, 2 * C, batch_first=True, **{"dropout": 0.2, **options})
    return [make() for _ in range(3)]


def through(layers: Blocks, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def step(function: Callable[[Tensor], Tensor], layers: Blocks, times: int = 1) -> tuple[list[Tensor | None], int]:
    """Gradients and the generator's next draw; how many forwards of a block there were."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, C, requires_grad=True)
    for layer in layers:
        layer.zero_grad()
    with CountOps() as count:
        loss = function(x).square().sum()
        for turn in range(times):
            loss.backward(retain_graph=turn + 1 < times)
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters()), torch.rand(3)]
    return found, sum(count.calls[f"ckptfused.{name}_fwd"] for name in ("block", "attention_block", "ffn_block"))


def same(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or a.equal(b))  # type: ignore[arg-type]


ENDING: dict[str, Callable[[Blocks], Callable[[Tensor], Tensor]]] = {
    "torch": lambda layers: lambda x: torchs(partial(through, layers), x),
    "ours": lambda layers: lambda x: ckptfused.checkpoint(partial(through, layers), x),
    "what follows saves nothing": lambda layers: lambda x: torchs(lambda x: through(layers, x).mT.mT, x),
    "a sequential": lambda layers: lambda x: torchs(ckptfused.FusedCheckpointSequential(*layers, segments=3), x),
    "one within another": lambda layers: lambda x: torchs(lambda x: torchs(partial(through, layers), x), x),
}


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0}], ids=["dropout", "none"])
@pytest.mark.parametrize("name", ENDING)
def test_the_last_forward_is_left_out(name: str, options: dict[str, Any]) -> None:
    layers = blocks(**options)
    want, forwards = step(partial(through, layers), layers)
    assert forwards == 3
    got, forwards = step(ENDING[name](layers), layers)
    same(got, want)
    assert forwards == 5


def test_halves_and_segments() -> None:
    half = {"dropout": 0.2}
    layers: Blocks = [ckptfused.FusedCheckpointAttention(C, 2, **half), ckptfused.FusedCheckpointFFN(C, 2 * C, **half)]
    want, _ = step(partial(through, layers), layers)
    got, forwards = step(lambda x: torchs(partial(through, layers), x), layers)
    same(got, want)
    assert forwards == 3
    layers = blocks()
    want, _ = step(partial(through, layers), layers)
    one = ckptfused.FusedCheckpointSequential(*layers)
    got, forwards = step(lambda x: torchs(lambda x: one(layers[0](x)), x), layers)
    wanted, _ = step(lambda x: one(layers[0](x)), layers)
    same(got, wanted)
    assert forwards == 4 + 1 + 2  # of the replay the first alone; then the segment's own, without its last


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_last_of_a_segment_keeps_nothing(norm_first: bool) -> None:
    layers = blocks(keep="all", norm_first=norm_first)
    want, _ = step(partial(through, layers), layers)
    got, forwards = step(ckptfused.FusedCheckpointSequential(*layers), layers)
    same(got, want)
    assert forwards == 3 + 2


def watched(layers: Blocks, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return through(layers, x)


RUNNING: dict[str, tuple[Callable[[Blocks, Tensor], Tensor], dict[str, Any], int]] = {
    "what follows saves its input": (lambda layers, x: torchs(lambda x: through(layers, x).sin(), x), {}, 6),
    "the last but one": (lambda layers, x: torchs(lambda x: nn.functional.gelu(through(layers, x)), x), {}, 6),
    "it keeps values": (lambda layers, x: torchs(partial(through, layers), x), {"keep": "attention"}, 6),
    "hooks of its own": (lambda layers, x: torchs(partial(watched, layers), x), {}, 3),
}


@pytest.mark.parametrize("name", RUNNING)
def test_any_other_runs(name: str) -> None:
    function, options, expected = RUNNING[name]
    layers = blocks(**options)
    plain = {"what follows saves its input": torch.sin, "the last but one": nn.functional.gelu}.get(name, lambda y: y)
    want, _ = step(lambda x: plain(through(layers, x)), layers)
    got, forwards = step(partial(function, layers), layers)
    same(got, want)
    assert forwards == expected


@pytest.mark.parametrize("early", [True, False])
def test_as_the_checkpoint_says(early: bool) -> None:
    layers = blocks()
    want, _ = step(partial(through, layers), layers)
    context: AbstractContextManager[Any] = contextlib.nullcontext() if early else set_checkpoint_early_stop(False)
    with context:
        got, forwards = step(lambda x: torchs(partial(through, layers), x), layers)
    same(got, want)
    assert forwards == (5 if early else 6)


def test_backward_twice() -> None:
    """Each replays for itself."""
    layers = blocks()
    want, _ = step(partial(through, layers), layers, times=2)
    got, forwards = step(lambda x: torchs(partial(through, layers), x), layers, times=2)
    same(got, want)
    assert forwards == 3 + 2 + 2


def test_a_gradient_through_a_replay() -> None:
    """A second derivative."""
    layers = blocks(dropout=0.0)

    def penalty(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.linspace(-1, 1, 5 * C).view(1, 5, C).requires_grad_()
        (slope,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    torch.testing.assert_close(
        penalty(lambda x: torchs(partial(through, layers), x)), penalty(partial(through, layers)), rtol=1e-5, atol=1e-6
    )


def test_nothing_to_differentiate_saves_nothing() -> None:
    """A block without any gradient of its own is no end of what comes after it."""
    layers = blocks()
    for p in layers[0].parameters():
        p.requires_grad_(False)

    def function(given: Tensor) -> Tensor:
        return through(layers[1:], layers[0](given.detach())) + given

    want, _ = step(function, layers)
    got, forwards = step(lambda x: torchs(function, x), layers)
    same(got, want)
    assert forwards == 5
