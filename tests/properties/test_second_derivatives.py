"""Second derivatives by every entry point: against finite differences, and none that is dropped."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckptfused import FusedCheckpointSequential
from tests.properties import entries
from tests.properties.entries import ENTRIES, FUSED, C, block, each, made

Way = tuple[nn.Module, Callable[[Tensor], Tensor]]


def offloaded(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return module(x)

    return call


def checkpointed(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: torch_checkpoint(module, x, use_reentrant=False)


def in_a_row(*keeps: str, segments: int = 1) -> FusedCheckpointSequential:
    return FusedCheckpointSequential(*(block(0.25, keep=keep) for keep in keeps), segments=segments)


# Beside the entry points themselves: what is put around one, and what it is made of.
AROUND: dict[str, Callable[[], Way]] = {
    "segments that keep": lambda: within(in_a_row("all", "attention", "inputs", segments=2)),
    "a block twice": lambda: within(FusedCheckpointSequential(*[block(0.25)] * 2)),
    "torch checkpoint": lambda: within(nn.Sequential(block(0.25), nn.Tanh()), checkpointed),
    "torch checkpoint around a segment": lambda: within(in_a_row("inputs", "inputs"), checkpointed),
    "offloaded": lambda: within(block(0.25), offloaded),
    "offloaded segment": lambda: within(in_a_row("inputs", "inputs"), offloaded),
}


WAYS = [name for name in (*ENTRIES, *AROUND) if name != "hugging face"]  # whose last norm is in float32


def within(module: nn.Module, wrap: Callable[[nn.Module], Any] = lambda module: module) -> Way:
    module.double()
    return module, wrap(module)


def way_of(name: str) -> Way:
    if name in AROUND:
        return AROUND[name]()
    call = made(name, dtype=torch.float64)
    return call.module, call.run


def source(*shape: int) -> Tensor:
    return torch.randn(shape or (1, 3, C), dtype=torch.float64, requires_grad=True)


def same_masks(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The function with dropout's masks the same at every call; each backward finds the generator elsewhere."""
    later = itertools.count(6)

    def call(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(5)
        y = function(x)
        torch.manual_seed(next(later))
        return y

    return call


@pytest.mark.parametrize("way", WAYS)
def test_against_finite_differences(way: str) -> None:
    module, function = way_of(way)
    with sdpa_kernel(SDPBackend.MATH):  # a generic block's: SDPA's other kernels are differentiated once
        inputs = (source(), *list(module.parameters())[::4])  # test_gradcheck has all of a block's
        assert torch.autograd.gradgradcheck(same_masks(function), inputs, fast_mode=True)


@pytest.mark.parametrize("way", ["block", "attention", "ffn", "one segment", "torch checkpoint around a segment"])
@pytest.mark.parametrize("wanted", ["x", "parameter", "what comes back"])
def test_of_one_tensor_alone(wanted: str, way: str) -> None:
    """The graph of a backward has an edge to whatever requires a gradient, be it that alone."""
    module, function = way_of(way)
    module.eval().requires_grad_(wanted == "what comes back")
    x = source().detach()
    one = next(module.parameters()) if wanted == "parameter" else x
    one.requires_grad_()
    back = torch.randn_like(x).requires_grad_(wanted == "what comes back")
    (first,) = torch.autograd.grad(function(x), one, back, create_graph=True)
    assert first.requires_grad
    of = back if wanted == "what comes back" else one
    direction = torch.randn_like(first)
    (second,) = torch.autograd.grad(first, of, direction)
    # Along a direction, by central differences of first order gradients.
    step, along = 1e-6, torch.randn_like(of)

    def slope(sign: int) -> Tensor:
        with torch.no_grad():
            of.add_(along, alpha=sign * step)
        (gradient,) = torch.autograd.grad(function(x), one, back)
        with torch.no_grad():
            of.sub_(along, alpha=sign * step)
        return (gradient * direction).sum()

    expected = (slope(1) - slope(-1)).detach() / (2 * step)
    # Central differences of this step are right to about 1e-9 of numbers near one.
    torch.testing.assert_close((second * along).sum(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("segments", [1, 2])
def test_hessian_of_a_sequential(segments: int) -> None:
    torch.manual_seed(0)
    sequential = in_a_row("inputs", "inputs", segments=segments).double().eval()
    x = source(1, 2, C).detach()
    expected = torch.autograd.functional.hessian(lambda x: sequential[1](sequential[0](x)).square().sum(), x)
    assert expected.abs().max() > 1e-3
    for vectorize in (False, True):
        got = torch.autograd.functional.hessian(lambda x: sequential(x).square().sum(), x, vectorize=vectorize)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("way", ["block", "one segment", "offloaded segment"])
def test_a_penalty_beside_another_loss(way: str) -> None:
    """It is in the gradients; and the first gradient has the bits that it has without a graph."""
    module, function = way_of(way)
    module.eval()
    x = source()
    loss = function(x).square().sum()
    (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(first, plain)
    wanted = [x, *module.parameters()]
    both = torch.autograd.grad(loss + first.square().sum(), wanted, retain_graph=True)
    alone = torch.autograd.grad(loss, wanted, retain_graph=True)
    penalty = torch.autograd.grad(first.square().sum(), wanted)
    assert all(one.abs().max() > 0 for one in penalty)
    torch.testing.assert_close(both, tuple(a + b for a, b in zip(alone, penalty, strict=True)))


@pytest.mark.parametrize("blocks", [1, 2])
def test_third_derivatives(blocks: int) -> None:
    """Without a LayerNorm, the third derivative of which PyTorch itself gives wrong."""
    function = FusedCheckpointSequential(*(block(0.0) for _ in range(blocks))).double()

    def first(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        return gradient

    assert torch.autograd.gradgradcheck(first, source(), fast_mode=True)


def test_tied_weights() -> None:
    first, second = block(0.0).double(), block(0.0).double()
    second.linear1.weight = first.linear1.weight
    second.norm1.weight = second.norm2.weight = first.norm1.weight
    for function in (second, FusedCheckpointSequential(first, second)):
        assert torch.autograd.gradgradcheck(
            lambda x, *_, f=function: f(x), (source(), first.linear1.weight, first.norm1.weight), fast_mode=True
        )


@pytest.mark.parametrize("way", ["block", "one segment"])
def test_a_change_in_place_between_the_derivatives_raises(way: str) -> None:
    module, function = way_of(way)
    x = source()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("way", ["block", "one segment"])
def test_autocast(way: str) -> None:
    """Computed in the types of the forward, whatever is on in backward; against the same in float64."""
    module, function = way_of(way)
    module.eval()
    x = source()
    found = []
    for dtype, inside in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        module.to(dtype)
        leaf = x.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            y = function(leaf)
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            (first,) = torch.autograd.grad(y.float().square().sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    assert torch.equal(found[1], found[2])
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert error < 0.1  # bfloat16 has 8 bits; a few products of them in a row


@each(FUSED)
def test_a_backward_lets_go_of_its_input(name: str) -> None:
    call = made(name, 0.0)
    hidden = entries.source() * 1.0
    reference = weakref.ref(hidden)
    y = call.run(hidden)
    del hidden
    gc.collect()
    assert reference() is not None
    y.sum().backward()
    assert reference() is None
    del y


@pytest.mark.parametrize("shape", [(2, 0, C), (0, 3, C)])
def test_of_no_tokens_they_are_none(shape: tuple[int, ...]) -> None:
    module = block(0.25).double()
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(module(x).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves, allow_unused=True)  # type: ignore[arg-type]
    assert all(t is None or (t.shape == leaf.shape and not t.any()) for t, leaf in zip(second, leaves, strict=True))
