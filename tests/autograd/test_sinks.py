"""Attention sinks, a logit of each head beside those of the keys, against the softmax that has them written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ckptfused import cost, functional
from ckptfused.cost.products import AttentionWork
from ckptfused.spec import AttentionSpec, BlockSpec

B, T, C, H, G, D = 2, 150, 24, 4, 2, 6
DOUBLE = torch.float64


def half(**options: object) -> BlockSpec:
    return BlockSpec(AttentionSpec(H, G, D, sinks=True, **options))  # type: ignore[arg-type]


def made(dtype: torch.dtype = DOUBLE) -> tuple[Tensor, dict[str, Tensor]]:
    """x and the parameters of an attention half."""
    draw = torch.Generator().manual_seed(2)
    shapes = {"q_w": (H * D, C), "k_w": (G * D, C), "v_w": (G * D, C), "o_w": (C, H * D), "sinks": (H,)}
    params = {
        f"attn.{name}": torch.randn(shape, generator=draw, dtype=DOUBLE).mul(0.5) for name, shape in shapes.items()
    }
    x = torch.randn(B, T, C, generator=draw, dtype=DOUBLE)
    return x.to(dtype).requires_grad_(), {name: t.to(dtype).requires_grad_() for name, t in params.items()}


def tiles(spec: BlockSpec) -> int:
    """Calls of attention of fewer queries than keys in a forward: those of tiles say how many keys there are."""
    work = cost.forward_ledger(spec, B, T, C, DOUBLE).work
    return sum(isinstance(item, AttentionWork) and item.keys == T for item in work)


def written_out(x: Tensor, params: dict[str, Tensor], mask: Tensor) -> Tensor:
    """x + what heads with sinks make of it. mask: bool, of the keys that a query sees."""
    q, k, v = (
        (x @ params[f"attn.{name}_w"].mT).unflatten(-1, (-1, D)).transpose(1, 2).repeat_interleave(n, 1)
        for name, n in (("q", 1), ("k", H // G), ("v", H // G))
    )
    logits = (q @ k.mT / math.sqrt(D)).masked_fill(~mask, -torch.inf)
    joined = torch.cat((logits, params["attn.sinks"].view(1, H, 1, 1).expand(B, H, T, 1)), -1)
    o = joined.softmax(-1)[..., :-1] @ v
    return x + o.transpose(1, 2).flatten(2) @ params["attn.o_w"].mT


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
SOME = CAUSAL.clone()
SOME[5] = False


@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
@pytest.mark.parametrize("sees", [CAUSAL, SOME], ids=["causal", "a-row-sees-none"])
def test_values_and_gradients(sees: Tensor, scratch: int) -> None:
    """A query that sees no key sees its sink alone: it gets 0."""
    x, params = made()
    spec = BlockSpec(half(mask="keep").attn, scratch=scratch)
    assert tiles(spec) == (6 if scratch else 0)
    y = functional.attention_block(x, params, spec, mask=sees[None, None])
    expected = written_out(x, params, sees)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    leaves, dy = [x, *params.values()], torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, leaves, dy) for out in (y, expected))
    for name, a, b in zip(("x", *params), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("frozen", [{}, {"pre": "layernorm", "post": "rmsnorm"}, {"out": "layernorm"}], ids=str)
@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
def test_sinks_alone_are_trained(frozen: dict[str, str], scratch: int) -> None:
    x, params = made()
    spec = BlockSpec(half(causal=True, **frozen).attn, scratch=scratch)
    y = functional.attention_block(x, params, spec)
    dy = torch.randn_like(y)
    (every,) = torch.autograd.grad(y, params["attn.sinks"], dy)
    alone = {name: t.detach() for name, t in params.items()} | {"attn.sinks": params["attn.sinks"]}
    (found,) = torch.autograd.grad(functional.attention_block(x.detach(), alone, spec), params["attn.sinks"], dy)
    assert every.any() and torch.equal(found, every)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    x, params = made(dtype)
    params["attn.sinks"] = torch.full((H,), -torch.inf, requires_grad=True)
    plain = {name: t for name, t in params.items() if name != "attn.sinks"}
    y = functional.attention_block(x, params, half(mask="keep"), mask=SOME[None, None])
    without = BlockSpec(AttentionSpec(H, G, D, mask="keep"))
    expected = functional.attention_block(x, plain, without, mask=SOME[None, None])
    assert torch.equal(y, expected)
    grads = torch.autograd.grad(y.sum(), [*params.values(), x])
    wanted = torch.autograd.grad(expected.sum(), [*plain.values(), x])
    assert not grads[len(plain)].any()
    for a, b in zip((*grads[: len(plain)], grads[-1]), wanted, strict=True):
        assert torch.equal(a, b)


def test_a_large_sink_takes_all() -> None:
    x, params = made(torch.float32)
    params["attn.sinks"] = torch.full((H,), 1e4, requires_grad=True)
    y = functional.attention_block(x, params, half(causal=True))
    assert torch.equal(y, x)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, *params.values()]))


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
def test_a_sink_that_is_no_number_is_seen(dtype: torch.dtype) -> None:
    """A head whose sink is +inf gives nothing, as in the limit; such a sink's gradient is no number."""
    x, params = made(dtype)
    params["attn.o_w"] = torch.eye(C, dtype=dtype)  # C is H * D: each head by itself
    for value in (torch.nan, torch.inf):
        sinks = torch.tensor([0.0, value, 1.0, 1.0], dtype=dtype, requires_grad=True)
        y = functional.attention_block(x, {**params, "attn.sinks": sinks}, half(causal=True))
        heads = (y - x).unflatten(-1, (H, D)).transpose(1, 2)[0]
        assert heads[1].isnan().all() if value != value else not heads[1].any()
        (found,) = torch.autograd.grad(y.sum(), sinks)
        assert found[1].isnan()


def test_sinks_of_another_shape_are_refused() -> None:
    x, params = made()
    params["attn.sinks"] = torch.zeros(H + 1, dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"params\['attn.sinks'\]: expected .*4.*got.*5"):
        functional.attention_block(x, params, half(causal=True))
    del params["attn.sinks"]
    with pytest.raises(ValueError, match=r"params\['attn.sinks'\]: expected a tensor of shape \[4\], got None"):
        functional.attention_block(x, params, half(causal=True))
