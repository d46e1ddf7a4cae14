"""What `MadeAgain` keeps of a call, and what backward gets of what it let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from ckptfused.recompute.made_again import MadeAgain
from tests.accounting import CountOps, saved_bytes

W = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


def called(function: Callable[..., Tensor], *args: Tensor, proved: set[Any] | None = None) -> Tensor:
    again = MadeAgain()
    with again.at_work():
        y = function(*args)
    again.settle(set() if proved is None else proved)
    again.end()
    return y


def source() -> Tensor:
    # Rows of which no two weights are alike.
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def routed(x: Tensor) -> Tensor:
    """A norm and a router: in-place division, a choice, and views of what is saved."""
    normed = F.layer_norm(x * 2, (8,))
    weights, ids = F.linear(normed, W).softmax(-1).topk(2, dim=-1)
    weights /= weights.sum(-1, keepdim=True)
    return (normed.view(-1, 8)[:, :6].gather(1, ids) * weights.exp()).sum(1)


def jittered(x: Tensor) -> Tensor:
    """A draw, and a write to what was made before it."""
    hidden = x.sin()
    hidden *= torch.empty_like(hidden).uniform_(0.5, 1.5)
    return (hidden.tanh() * F.dropout(hidden, 0.5)).exp()


FUNCTIONS = pytest.mark.parametrize("function", [routed, jittered], ids=lambda f: f.__name__)


def gradients(y: Tensor, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    weight = torch.arange(y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), x, **options)


@FUNCTIONS
def test_gradients_have_the_bits_of_what_is_kept(function: Callable[[Tensor], Tensor]) -> None:
    x = source()
    torch.manual_seed(0)
    plain = function(x)
    torch.manual_seed(0)
    y = called(function, x)
    state = torch.get_rng_state()
    expected = gradients(plain, x)
    for _ in range(2):
        (found,) = gradients(y, x, retain_graph=True)
        assert torch.equal(y, plain) and torch.equal(found, expected[0])
    assert torch.equal(torch.get_rng_state(), state)


@FUNCTIONS
def test_second_derivatives(function: Callable[[Tensor], Tensor]) -> None:
    results = []
    for run in (lambda f, x: f(x), called):
        x = source()
        torch.manual_seed(0)
        (first,) = gradients(run(function, x), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(results[1], results[0])


def test_what_a_router_keeps() -> None:
    """Its input, and each choice in a byte; not what it is called with beside."""
    x = source()
    assert saved_bytes(lambda: called(routed, x), own=[W]) == x.nbytes + 5 * 2


def test_a_draw_is_kept_and_what_follows_made_again() -> None:
    x = source()
    plain = saved_bytes(lambda: jittered(x))
    # The numbers drawn, and the mask that dropout drew with its result.
    assert saved_bytes(lambda: called(jittered, x)) <= x.nbytes * 4 < plain


def test_operations_are_made_again_once() -> None:
    x = source()
    y = called(routed, x)
    with CountOps() as plainly:
        gradients(routed(x), x)
    with CountOps() as again:
        gradients(y, x)
    assert again.calls["aten.native_layer_norm"] == plainly.calls["aten.native_layer_norm"] == 1
    assert again.calls["aten.topk"] == 0


def test_hooks_around_it_get_what_is_kept() -> None:
    x, got = source(), []

    def pack(t: Tensor) -> Tensor:
        got.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = called(routed, x)
    assert sum(t is x for t in got) == 1
    with save_on_cpu():
        other = called(routed, x)
    expected = gradients(routed(x), x)[0]
    assert torch.equal(gradients(y, x)[0], expected) and torch.equal(gradients(other, x)[0], expected)


def test_what_was_saved_and_changed_in_place_raises() -> None:
    made = []

    def function(x: Tensor) -> Tensor:
        made.append(x.sin())
        return made[0].exp() * made[0]

    x = source()
    y = called(function, x)
    made[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y, x)


def test_what_it_is_made_of_and_was_changed_in_place_raises() -> None:
    x, scale = source(), torch.full((8,), 3.0)
    y = called(lambda x, scale: (x * scale).exp().sin(), x, scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y, x)


def test_what_the_function_itself_changes_is_kept_as_it_was_read() -> None:
    """The counter is read before it is written: what was made of it cannot be made again, even if the first write left
    its values as they were."""
    count, proved, x = torch.ones(8), set[Any](), source()
    expected = gradients((x * torch.ones(8).sin()).exp().sin(), x)[0]
    for step in (0, 1):

        def function(x: Tensor, step: int = step) -> Tensor:
            y = (x * count.sin()).exp().sin()
            count.add_(step)
            return y

        assert torch.equal(gradients(called(function, x, proved=proved), x)[0], expected)
    assert torch.equal(count, torch.full((8,), 2.0))


@pytest.mark.parametrize("fresh", [False, True], ids=["in place", "into new memory"])
def test_what_no_dispatcher_sees_is_kept(fresh: bool) -> None:
    """A kernel that is launched past PyTorch writes so."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            y = torch.empty_like(t) if fresh else t.clone()
            y.detach().numpy()[:] = t.detach().numpy() * 3
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy * 3

    def function(x: Tensor) -> Tensor:
        return Kernel.apply(x.sin()).exp().sin()  # type: ignore[no-any-return, no-untyped-call]

    x = source()
    assert torch.equal(gradients(called(function, x), x)[0], gradients(function(x), x)[0])


def test_a_kind_of_call_is_tried_once() -> None:
    proved: set[Any] = set()
    counts = []
    for _ in range(2):
        with CountOps() as ops:
            called(routed, source(), proved=proved)
        counts.append(ops.calls["aten.native_layer_norm"])
    assert counts == [2, 1] and len(proved) == 1


def test_backward_under_autocast_makes_what_the_forward_made() -> None:
    x = source()
    with torch.autocast("cpu", torch.bfloat16):
        plain, y = routed(x), called(routed, x)
    expected = gradients(plain, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gradients(y, x)[0], expected)


def test_nothing_outlives_the_graph() -> None:
    x, scale = source(), torch.full((8,), 3.0)
    y = called(lambda x, scale: (x * scale).exp().softmax(-1).sin(), x, scale)
    held = weakref.ref(scale)
    del scale
    gc.disable()
    try:
        assert held() is not None
        del y
        assert held() is None
    finally:
        gc.enable()
