"""`torch.func` transforms, forward-mode derivatives and batched gradients of blocks, halves, segments and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from ckptfused import functional as ops
from ckptfused.spec import param_names

B, T, C, H, HIDDEN = 1, 3, 8, 2, 6
# PyTorch's words on ways that it is still building.
pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated):UserWarning")


def llama(**options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, **options)


def by_function() -> nn.Module:
    """`functional.block` as a module."""

    class Function(FusedCheckpointBlock):
        def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
            spec = self.spec(src.dtype)
            call = self.prepare(src)
            return ops.block(
                src, dict(zip(param_names(spec), call.slots, strict=True)), spec, cos=call.cos, sin=call.sin
            )

    return Function.llama(C, H, HIDDEN)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": llama,
    "encoder": lambda: FusedCheckpointBlock(C, H, HIDDEN, 0.0),
    "attention": lambda: FusedCheckpointAttention(C, H, 0.0, norm_first=True),
    "ffn": lambda: FusedCheckpointFFN(C, HIDDEN, 0.0),
    "sequential": lambda: FusedCheckpointSequential(llama(), llama()),
    "functional": by_function,
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return MODULES[name]().double(), torch.randn(B, T, C, dtype=torch.float64)


def jacobian(module: nn.Module, x: Tensor) -> Tensor:
    """Row by row, by the fused backward."""
    found: Tensor = torch.autograd.functional.jacobian(module, x)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_transforms_by_the_input(name: str) -> None:
    module, x = made(name)
    expected, other = jacobian(module, x), torch.randn_like(x)
    y = module(x)

    def loss(x: Tensor) -> Tensor:
        return (module(x) * other).sum()

    gradient = (expected * other[..., None, None, None]).sum((0, 1, 2))
    pushed = (expected * other).sum((3, 4, 5))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(module(forward_ad.make_dual(x, other))).tangent
    results = {
        "grad": (torch.func.grad(loss)(x), gradient),
        "vjp": (torch.func.vjp(module, x)[1](other)[0], gradient),
        "jvp": (torch.func.jvp(module, (x,), (other,))[1], pushed),
        "forward_ad": (dual, pushed),
        "jacrev": (torch.func.jacrev(module)(x), expected),
        "jacfwd": (torch.func.jacfwd(module)(x), expected),
        "vmap": (torch.vmap(module)(torch.stack((x, x + other)))[0], y),
        "vectorize": (torch.autograd.functional.jacobian(module, x, vectorize=True), expected),
    }
    for way, (got, want) in results.items():
        torch.testing.assert_close(got, want, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("name", ["block", "sequential"])
def test_gradients_by_each_example(name: str) -> None:
    """vmap over grad of functional_call, as per-sample gradients are written."""
    module, x = made(name)
    weights = {key: value.detach() for key, value in module.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, weights, (x,)).square().sum()

    batch = torch.stack((x, -x, 2 * x))
    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, batch)
    for i, one in enumerate(batch):
        expected = torch.autograd.grad(module(one).square().sum(), list(module.parameters()))
        torch.testing.assert_close([value[i] for value in each.values()], list(expected))


@pytest.mark.parametrize("name", MODULES)
def test_batched_gradients_have_the_bits_of_single_ones(name: str) -> None:
    module, x = made(name)
    x.requires_grad_()
    y = module(x)
    wanted = [x, *module.parameters()]
    many = torch.randn(3, *y.shape, dtype=y.dtype)
    single = [torch.autograd.grad(y, wanted, one, retain_graph=True) for one in many]
    expected = [torch.stack(each) for each in zip(*single, strict=True)]
    old = torch.autograd.grad(y, wanted, many, retain_graph=True, is_grads_batched=True)
    new = torch.vmap(lambda one: torch.autograd.grad(y, wanted, one, retain_graph=True))(many)
    for way in (old, new):
        assert all(torch.equal(a, b) for a, b in zip(way, expected, strict=True))


@pytest.mark.parametrize("name", ["block", "sequential"])
def test_batched_gradients_are_differentiable(name: str) -> None:
    module, x = made(name)
    x.requires_grad_()
    y = module(x)
    many = torch.randn(3, *y.shape, dtype=y.dtype)

    def second(first: Tensor) -> Tensor:
        return torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]

    def one(back: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, back, create_graph=True)[0]

    expected = second(torch.stack([one(back) for back in many]))
    torch.testing.assert_close(second(torch.vmap(one)(many)), expected)
    batched = torch.autograd.grad(y, x, many, create_graph=True, is_grads_batched=True)[0]
    torch.testing.assert_close(second(batched), expected)


def test_dropout_draws_as_vmap_is_told() -> None:
    module = llama(dropout=0.5)
    x = torch.randn(B, T, C)
    batch = torch.stack((x, x))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(module)(batch)
    one, other = torch.vmap(module, randomness="same")(batch)
    torch.testing.assert_close(one, other)
    one, other = torch.vmap(module, randomness="different")(batch)
    assert not torch.allclose(one, other)
    module.eval()
    torch.testing.assert_close(torch.vmap(module)(batch)[0], module(x))


def test_dropout_keeps_the_mean() -> None:
    """Kept values are scaled as the op scales them."""
    ffn = FusedCheckpointFFN(C, HIDDEN, 0.0, residual_dropout=0.25, norm="none").double()
    x = torch.zeros(1, 4000, C, dtype=torch.float64)
    drawn = torch.vmap(ffn, randomness="different")(x[None])[0]
    with torch.no_grad():
        expected = ffn.eval()(x[:, :1])
    kept = (drawn != 0).double().mean()
    assert abs(kept - 0.75) < 0.015  # 32,000 draws: six standard deviations
    torch.testing.assert_close(drawn.sum((0, 1)) / (drawn != 0).sum((0, 1)), expected.flatten() / 0.75)


def test_autocast_within_a_transform() -> None:
    module = llama()
    x = torch.randn(B, T, C)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.functional.vjp(module, x, torch.ones_like(x))[1]
        got = torch.func.vjp(module, x)[1](torch.ones_like(x))[0]
    assert got.dtype == expected.dtype == torch.float32
    assert not torch.equal(got, torch.func.vjp(module, x)[1](torch.ones_like(x))[0])
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)  # two orders of rounding to 8 bits


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of PyTorch's attention within vmap
def test_layers_that_cannot_be_fused() -> None:
    block = FusedCheckpointBlock(C, H, HIDDEN, 0.0, torch.tanh).double()
    x = torch.randn(T, B, C, dtype=torch.float64)
    for module in (block, FusedCheckpointSequential(block, FusedCheckpointBlock(C, H, HIDDEN, 0.0).double())):
        torch.testing.assert_close(torch.func.jacrev(module)(x), torch.autograd.functional.jacobian(module, x))
        torch.testing.assert_close(torch.vmap(module)(x[None])[0], module(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks of shapes
@pytest.mark.parametrize("name", MODULES)
def test_traced_by_torch_jit(name: str) -> None:
    """The older exporter to ONNX traces so; what was traced has gradients."""
    module, x = made(name)
    module(x)  # which makes the rotary table, or the trace would have its making as well
    traced = torch.jit.trace(module, x)
    other = torch.randn_like(x)
    torch.testing.assert_close(traced(other), module(other))
    torch.testing.assert_close(jacobian(traced, other), jacobian(module, other))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_draws_dropout_anew() -> None:
    module = llama(dropout=0.5)
    x = torch.randn(B, T, C)
    traced = torch.jit.trace(module, x, check_trace=False)
    assert not torch.allclose(traced(x), traced(x))


def test_a_call_after_a_transform_is_fused_again() -> None:
    """Nothing of a transform stays in the module: tables that grew within it serve a longer call, too."""
    module, x = made("block")
    torch.func.grad(lambda x: module(x).sum())(x)
    longer = torch.randn(B, 2 * T, C, dtype=torch.float64, requires_grad=True)
    torch.func.jacfwd(module)(longer.detach())
    y = module(longer)
    assert y.grad_fn is not None and "BlockFunction" in y.grad_fn.name()
    torch.testing.assert_close(y[:, :T], module(longer[:, :T]))
