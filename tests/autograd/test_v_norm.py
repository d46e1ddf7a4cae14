"""The norm of each head of v, which has no weights (Gemma 4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused import functional
from ckptfused.ops.kv_cache import keys_and_values
from ckptfused.spec import KEEP_PRESETS, AttentionSpec, BlockSpec, param_names

B, T, C, H, G, D = 2, 150, 24, 4, 2, 6
DOUBLE = torch.float64


def half(keep: str = "inputs", scratch: int = 0, **options: Any) -> BlockSpec:
    given = {"v_norm": "rmsnorm", "v_eps": 1e-3, "causal": True, **options}
    return BlockSpec(AttentionSpec(H, G, D, **given), scratch=scratch).with_keep(keep)


def made(dtype: torch.dtype = DOUBLE) -> tuple[Tensor, dict[str, Tensor]]:
    """x and the parameters."""
    draw = torch.Generator().manual_seed(2)
    shapes = {"q": (C, C), "k": (G * D, C), "v": (G * D, C), "o": (C, C)}
    params = {f"attn.{n}_w": torch.randn(s, generator=draw, dtype=DOUBLE).mul(0.5) for n, s in shapes.items()}
    x = torch.randn(B, T, C, generator=draw, dtype=DOUBLE)
    return x.to(dtype).requires_grad_(), {n: t.to(dtype).requires_grad_() for n, t in params.items()}


def written_out(x: Tensor, params: dict[str, Tensor], kind: str, eps: float, qk_norm: str) -> Tensor:
    q, k, v = (F.linear(x, params[f"attn.{n}_w"]).view(B, T, -1, D).transpose(1, 2) for n in "qkv")
    if qk_norm != "none":
        q, k = (F.rms_norm(t, (D,), eps=1e-5) for t in (q, k))
    v = v - v.mean(-1, keepdim=True) if kind == "layernorm" else v
    v = v / (v.square().mean(-1, keepdim=True) + eps).sqrt()
    k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
    scores = (q @ k.mT) * D**-0.5
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    o = scores.softmax(-1) @ v
    return x + F.linear(o.transpose(1, 2).flatten(2), params["attn.o_w"])


@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
@pytest.mark.parametrize("qk_norm", ["none", "rmsnorm"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("keep", ["inputs", "attention+mid+qkv"])
def test_it_is_that_of_each_head(kind: str, qk_norm: str, scratch: int, keep: str) -> None:
    x, params = made()
    y = functional.attention_block(x, params, half(keep, scratch, v_norm=kind, qk_norm=qk_norm))
    expected = written_out(x, params, kind, 1e-3, qk_norm)
    leaves, dy = [x, *params.values()], torch.randn_like(y)
    pairs = [(y, expected), *zip(*(torch.autograd.grad(out, leaves, dy) for out in (y, expected)), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": "rmsnorm"}, {"qk_norm": "rmsnorm", "qk_place": "row"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_same_whatever_is_kept(dtype: torch.dtype, options: dict[str, str], scratch: int) -> None:
    """A second backward reads what the first one did: the product of v is not written to."""
    x, params = made(dtype)
    leaves, dy, first = [x, *params.values()], torch.randn(B, T, C).to(dtype), None
    for keep in KEEP_PRESETS:
        y = functional.attention_block(x, params, half(keep, scratch, **options))
        for retain in (True, False):
            grads = (y.detach(), *torch.autograd.grad(y, leaves, dy, retain_graph=retain))
            first = grads if first is None else first
            assert all(map(torch.equal, grads, first)), keep


def test_a_cache_gets_it() -> None:
    """v as attention reads it, from the raw product."""
    x, params = made()
    spec = half("attention+mid+qkv")
    product = torch.cat([F.linear(x, params[f"attn.{n}_w"]) for n in "qkv"], -1)
    slots = [params.get(name) for name in param_names(spec)]
    _, v = keys_and_values(product, slots, spec.to_string(), None, None)
    raw = product[..., -G * D :].unflatten(-1, (G, D)).transpose(1, 2)
    torch.testing.assert_close(v, raw * (raw.square().mean(-1, keepdim=True) + 1e-3).rsqrt(), rtol=1e-10, atol=1e-12)
