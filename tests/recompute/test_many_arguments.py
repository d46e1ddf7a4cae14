"""Calls with many tensors: the copy of each has an edge of its own in the graph, in a replay too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ckptfused

SMALL, LARGE = 8, 4096


def arguments(large: int = 2) -> list[Tensor]:
    """Sixty small tensors, of which some want no gradient and one is an integer, and large ones."""
    torch.manual_seed(0)
    tensors = [torch.randn(SMALL, dtype=torch.float64, requires_grad=i % 5 != 4) for i in range(60)]
    tensors += [torch.randn(LARGE, dtype=torch.float64, requires_grad=True) for _ in range(large)]
    return [*tensors, torch.arange(SMALL)]


def function(*tensors: Tensor) -> Tensor:
    """Reads all but the first, one twice; writes one in place."""
    *floats, index = tensors
    floats[3].mul_(2)
    total = floats[1].sin()
    for i, t in enumerate(floats[2:]):
        total = total * 0.9 + (t[:SMALL] * t[-SMALL:]).cos() * floats[1] + i
    return (total * floats[3])[index]


def plain(*tensors: Tensor) -> Tensor:
    """The same, where a leaf may be written."""
    return function(*(t.clone() for t in tensors))


def with_gradients(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of which a gradient is asked."""
    return [t for t in tensors if t.requires_grad]


def test_gradients_are_those_of_the_plain_call() -> None:
    tensors = arguments()
    wanted = with_gradients(tensors)
    expected = torch.autograd.grad(plain(*tensors).sum(), wanted, allow_unused=True)
    got = torch.autograd.grad(ckptfused.checkpoint(function, *tensors).sum(), wanted, allow_unused=True)
    assert got[0] is None and expected[0] is None
    assert all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))


@pytest.mark.parametrize("place", [1, 3, 30, -2], ids=["twice", "written", "small", "large"])
def test_one_gradient_may_be_asked_for_alone_and_again(place: int) -> None:
    tensors = arguments()
    expected = torch.autograd.grad(plain(*tensors).sum(), tensors[place])
    y = ckptfused.checkpoint(function, *tensors).sum()
    for _ in range(2):
        assert torch.equal(*torch.autograd.grad(y, tensors[place], retain_graph=True), *expected)


def test_second_derivatives_are_those_of_the_plain_call() -> None:
    tensors = arguments()
    wanted = with_gradients(tensors)[1:]

    def second(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    got, expected = second(ckptfused.checkpoint(function, *tensors).sum()), second(plain(*tensors).sum())
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, expected, strict=True))


def test_hooks_see_each_gradient_once() -> None:
    tensors = arguments()
    seen: list[tuple[str, Tensor]] = []

    def hooked(*tensors: Tensor) -> Tensor:
        tensors[7].register_hook(lambda g: seen.append(("within", g)))
        return function(*tensors)

    tensors[7].register_hook(lambda g: seen.append(("outside", g)))
    expected = torch.autograd.grad(plain(*tensors).sum(), tensors[7])[0]
    seen.clear()
    ckptfused.checkpoint(hooked, *tensors).sum().backward()
    assert [name for name, _ in seen] == ["within", "outside"]
    assert all(torch.equal(g, expected) for _, g in seen)


def test_who_asks_for_a_small_gradient_pays_for_no_large_one() -> None:
    tensors = arguments(large=1)
    paid: list[Tensor] = []

    def watched(*tensors: Tensor) -> Tensor:
        large = tensors[-2].exp()
        large.register_hook(paid.append)
        return tensors[1] + large[:SMALL]

    y = ckptfused.checkpoint(watched, *tensors).sum()
    torch.autograd.grad(y, tensors[1], retain_graph=True)
    assert not paid
    torch.autograd.grad(y, tensors[-2])
    assert len(paid) == 1


def test_what_is_not_used_sees_no_gradient() -> None:
    """Neither a hook on it, nor the function that made it, which would give its own inputs zeros."""
    tensors, seen = arguments(), []
    base = torch.randn(SMALL, dtype=torch.float64, requires_grad=True)
    tensors[0].register_hook(seen.append)
    y = ckptfused.checkpoint(function, Doubled.apply(base), *tensors[1:-1], tensors[-1])
    y.sum().backward()
    assert base.grad is None and tensors[0].grad is None and not seen


class Doubled(torch.autograd.Function):
    """Materialises zeros where no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_parts_of_a_graph_are_used_up_one_by_one() -> None:
    tensors = with_gradients(arguments())[:40]
    made = [t.exp() for t in tensors]
    a, b = ckptfused.checkpoint(lambda *given: (given[0].sin().sum(), given[1].cos().sum()), *made)
    a.backward()
    b.backward()
    assert torch.allclose(tensors[0].grad, made[0].cos() * made[0])  # type: ignore[arg-type]
    assert torch.allclose(tensors[1].grad, -made[1].sin() * made[1])  # type: ignore[arg-type]


def test_a_function_may_differentiate_behind_its_arguments() -> None:
    """Forces: the gradient of an energy by positions of which the argument was made."""
    positions = torch.randn(SMALL, dtype=torch.float64, requires_grad=True)

    def forces(features: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(features.square().sum(), positions, create_graph=True)
        return found.sin()

    expected = torch.autograd.grad(forces(positions.exp()).sum(), positions)
    assert torch.equal(*torch.autograd.grad(ckptfused.checkpoint(forces, positions.exp()).sum(), positions), *expected)


def test_compiled_autograd_takes_them() -> None:
    tensors = with_gradients(arguments())[:45]
    y = ckptfused.checkpoint(lambda *tensors: torch.stack(tensors).sin().sum(), *tensors)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):  # type: ignore[no-untyped-call]
        y.backward()
    assert all(torch.equal(t.grad, t.cos()) for t in tensors if t.grad is not None) and tensors[0].grad is not None
