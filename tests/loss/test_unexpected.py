"""The loss head where nobody would look: shapes of one and none, values that overflow, transforms, symbols."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused
from ckptfused.loss import HeadAdapter

lce: Any = ckptfused.linear_cross_entropy
WAYS = [(keep, scratch) for keep in ("gradients", "inputs") for scratch in (None, 1)]
ways = pytest.mark.parametrize(("keep", "scratch"), WAYS)


def stock(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), target.flatten(), **options)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def with_value(t: Tensor, value: float) -> Tensor:
    t = t.detach().clone()
    t.view(-1)[3] = value
    return t.requires_grad_()


def agree(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> None:
    """Loss and gradients of whatever requires them, NaN where PyTorch's are."""
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    losses = [lce(x, weight, target, bias, **options), stock(x, weight, target, bias)]
    got, expected = ([loss, *torch.autograd.grad(loss, wanted)] for loss in losses)
    torch.testing.assert_close(got, expected, equal_nan=True)


BIAS = torch.tensor([0.0, 0.0, 0.0, -math.inf, 0.0, 0.0, 0.0, 0.0, 0.0])
OTHERS = torch.tensor([0, 1, 2, 4, 5])
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "one class": lambda: (normal(5, 8), normal(1, 8), torch.zeros(5, dtype=torch.int64)),
    "one wide": lambda: (normal(5, 1), normal(9, 1), torch.arange(5)),
    "no width": lambda: (normal(5, 0), normal(9, 0), torch.arange(5)),
    "no tokens": lambda: (normal(0, 8), normal(9, 8), torch.zeros(0, dtype=torch.int64)),
    "no target counts": lambda: (normal(5, 8), normal(9, 8), torch.full((5,), -100)),
    "logits beyond float32": lambda: (
        (normal(5, 8) * 1e22).detach().requires_grad_(), (normal(9, 8) * 1e22).detach().requires_grad_(),
        torch.arange(5),
    ),
    "inf in x": lambda: (with_value(normal(5, 8), math.inf), normal(9, 8), torch.arange(5)),
    "nan in weight": lambda: (normal(5, 8), with_value(normal(9, 8), math.nan), torch.arange(5)),
    "a class ruled out": lambda: (normal(5, 8), normal(9, 8), OTHERS, BIAS),
    "a target ruled out": lambda: (normal(5, 8), normal(9, 8), torch.arange(5), BIAS),
    "only bias": lambda: (normal(5, 8).detach(), normal(9, 8).detach(), torch.arange(5), normal(9)),
    "expanded": lambda: (normal(1, 8).expand(5, 8), normal(1, 8).expand(9, 8), torch.tensor(3).expand(5)),
    "strided": lambda: (normal(8, 5).t(), normal(8, 18).t()[::2], torch.arange(10)[::2] % 9),
    "x is weight": lambda: ((w := normal(9, 8)), w, torch.arange(9)),
}  # fmt: skip


@ways
@pytest.mark.parametrize("name", CASES)
def test_as_pytorch(name: str, keep: str, scratch: int | None) -> None:
    agree(*CASES[name](), keep=keep, scratch=scratch)


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
@pytest.mark.parametrize("items", [0, 0.0, torch.tensor(0), torch.tensor([0.0])], ids=["int", "float", "0d", "1d"])
def test_no_target_and_no_items(items: Any, keep: str) -> None:
    """NaN, and gradients of 0: a micro-batch without targets must not spoil those that it is added to."""
    x, weight, none = normal(5, 8), normal(9, 8), torch.full((5,), -100)
    loss = lce(x, weight, none, num_items=items, keep=keep)
    assert loss.isnan() and loss.shape == ()
    loss.backward()
    assert x.grad is not None and x.grad.eq(0).all() and weight.grad is not None and weight.grad.eq(0).all()
    some = lce(x, weight, torch.arange(5), num_items=items, keep=keep)
    assert some == math.inf
    assert lce(x, weight, none, num_items=7, keep=keep) == 0


def test_a_tensor_of_one_number_divides_as_a_number() -> None:
    x, weight, target = normal(5, 8), normal(9, 8), torch.arange(5)
    expected = stock(x, weight, target, reduction="sum") / 7
    for items in (7, torch.tensor(7), torch.tensor([7]), torch.tensor([[7.0]], dtype=torch.float64)):
        got = lce(x, weight, target, num_items=items)
        torch.testing.assert_close(got, expected)


def test_sequences_of_one_token_and_of_none_have_no_next() -> None:
    for length in (0, 1):
        x, target = normal(2, length, 8), torch.zeros(2, length, dtype=torch.int64)
        assert lce(x, normal(9, 8), target, shift=True).isnan()
        assert lce(x, normal(9, 8), target, shift=True, reduction="none").eq(0).all()
    with pytest.raises(ValueError, match="shift: expected a sequence of targets"):
        lce(normal(8), normal(9, 8), torch.tensor(3), shift=True)


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
def test_inf_into_an_ignored_token_stops_there(keep: str) -> None:
    x, weight, target = normal(4, 8), normal(9, 8), torch.tensor([1, -100, 2, 3])
    dloss = torch.tensor([1.0, math.inf, 1.0, 1.0])
    losses = (lce(x, weight, target, reduction="none", keep=keep), stock(x, weight, target, reduction="none"))
    got, expected = (torch.autograd.grad(loss, (x, weight), dloss) for loss in losses)
    torch.testing.assert_close(got, expected)


def test_function_transforms() -> None:
    """vmap, grad, their product (a gradient for each sample) and a Hessian run through plain PyTorch."""
    func, x, weight = torch.func, normal(5, 8).detach(), normal(9, 8).detach()
    many, targets = normal(3, 5, 8).detach(), torch.arange(15).view(3, 5) % 9
    for call in (
        lambda f: func.vmap(lambda x, t: f(x, weight, t))(many, targets),
        lambda f: func.grad(lambda w: f(x, w, targets[0]))(weight),
        lambda f: func.vmap(func.grad(lambda w, x, t: f(x, w, t)), (None, 0, 0))(weight, many, targets),
        lambda f: func.hessian(lambda x: f(x, weight, targets[0, :2]))(x[:2]),
        lambda f: torch.autograd.functional.hessian(lambda x: f(x, weight, targets[0, :2]), x[:2]),
    ):
        torch.testing.assert_close(call(lce), call(stock))


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batches_of_gradients(keep: str, reduction: str) -> None:
    x, weight, target = normal(5, 8), normal(9, 8), torch.arange(5)
    losses = [f(x, weight, target, reduction=reduction) for f in (partial(lce, keep=keep), stock)]
    many = normal(3, *losses[0].shape, seed=1).detach()
    got, expected = (
        torch.autograd.grad(loss, (x, weight), many, is_grads_batched=True, retain_graph=True) for loss in losses
    )
    torch.testing.assert_close(got, expected)
    got, expected = (torch.func.vmap(lambda d: torch.autograd.grad(loss, x, d)[0])(many) for loss in losses)  # noqa: B023
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
def test_third_derivatives(keep: str) -> None:
    x, weight, target = normal(3, 4, dtype=torch.float64), normal(5, 4, dtype=torch.float64), torch.arange(3)

    def third(loss: Tensor) -> Any:
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        second = torch.autograd.grad(sum((g**3).sum() for g in first), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in second), (x, weight))

    torch.testing.assert_close(third(lce(x, weight, target, keep=keep)), third(stock(x, weight, target)))


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
def test_a_weight_that_x_depends_on(keep: str) -> None:
    """A tied embedding is such a weight: its gradient here is that of the loss alone, whether or not it is
    differentiated.
    """
    embedding, target = normal(5, 4, dtype=torch.float64), torch.arange(3)

    def differentiated(loss: Callable[..., Tensor]) -> Any:
        x = embedding[target + 1].sin()
        (first,) = torch.autograd.grad(loss(x, embedding, target), embedding, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), embedding)

    torch.testing.assert_close(differentiated(partial(lce, keep=keep)), differentiated(stock))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.extended)])
def test_compiled_with_symbols(dynamic: bool | None) -> None:
    """Lengths, numbers of items and options that torch.compile traces as symbols."""
    torch._dynamo.reset()
    weight = normal(9, 8)

    def function(x: Tensor, target: Tensor, items: float, cap: float) -> Tensor:
        return lce(x, weight, target, num_items=items, softcap=cap, scratch=1000, shift=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length, items, cap in ((5, 3, 2.0), (7, 4, 2.0), (6, 7.5, 3.0), (2, 8.5, 3.5)):
        x, target = normal(2, length, 8), torch.arange(2 * length).view(2, length) % 9
        got, expected = (f(x, target, items, cap) for f in (compiled, function))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(expected, x))


HALVES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
@pytest.mark.parametrize("products", HALVES[1:], ids=str)
@pytest.mark.parametrize("of_x", HALVES, ids=str)
def test_derivatives_of_mixed_types_under_autocast(of_x: torch.dtype, products: torch.dtype, keep: str) -> None:
    """The second ones are PyTorch's to the bit: the same products, with everything else in float32."""
    target = torch.arange(5)
    for of_weight, of_bias in product(HALVES, (None, *HALVES)):
        x, weight = normal(5, 8, dtype=of_x), normal(9, 8, seed=1, dtype=of_weight)
        bias = None if of_bias is None else normal(9, seed=2, dtype=of_bias)
        wanted = [t for t in (x, weight, bias) if t is not None]
        with torch.autocast("cpu", products):
            losses = lce(x, weight, target, bias, keep=keep), stock(x, weight, target, bias)
        assert losses[0].dtype == torch.float32
        first = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
        # Theirs are rounded to the products' type and then to their own, ours where it is narrower once.
        eps = max(torch.finfo(dtype).eps for dtype in (products, *(t.dtype for t in wanted)))
        torch.testing.assert_close(first[0], first[1], rtol=2 * eps, atol=eps)
        graphs = [torch.autograd.grad(loss, wanted, create_graph=True) for loss in losses]
        second = [torch.autograd.grad(sum(g.float().square().sum() for g in graph), wanted) for graph in graphs]
        torch.testing.assert_close(*second, rtol=0, atol=0)


def test_autocast_leaves_float64_alone() -> None:
    x, weight, target = normal(5, 8, dtype=torch.float64), normal(9, 8, dtype=torch.float64), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.autograd.gradgradcheck(lambda *leaves: lce(*leaves, target), (x, weight))


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
def test_derivatives_of_one_token_without_a_batch(options: dict[str, Any], keep: str) -> None:
    leaves = normal(4, dtype=torch.float64), normal(5, 4, dtype=torch.float64), normal(5, dtype=torch.float64)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return lce(x, weight, torch.tensor(3), bias, keep=keep, **options)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    one, two = normal(4, dtype=torch.float64), normal(2, 4, dtype=torch.float64)
    adapter = HeadAdapter(two, normal(5, 2, dtype=torch.float64), p=0.5)
    again = torch.Generator().manual_seed(3)

    def dropped(x: Tensor) -> Tensor:
        options = {"adapters": [adapter], "generator": again.manual_seed(3)}
        return lce(x, leaves[1].detach(), torch.tensor(3), keep=keep, **options)

    assert torch.autograd.gradgradcheck(dropped, (one,))


def test_transforms_of_half_precision_and_under_autocast() -> None:
    """The transforms agree with the op: the loss is float32, the products have autocast's type, also those of float16
    inputs.
    """
    target = torch.arange(5)
    for dtype, enabled in product(HALVES, (False, True)):
        x, weight = normal(5, 8, dtype=dtype).detach(), normal(9, 8, dtype=dtype).detach()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            expected = lce(x, weight, target)
            got = torch.func.vmap(lambda x, t: lce(x, weight, t))(x[:, None], target[:, None]).mean()  # noqa: B023
        torch.testing.assert_close(got, expected)
