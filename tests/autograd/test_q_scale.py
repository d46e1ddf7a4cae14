"""Factors of q by position, which the caller gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import functional
from ckptfused.spec import KEEP_PRESETS, AttentionSpec, BlockSpec

B, T, C = 2, 150, 24
DOUBLE = torch.float64


def half(keep: str = "inputs", scratch: int = 0, **options: Any) -> BlockSpec:
    return BlockSpec(AttentionSpec(4, 2, 6, q_scale=True, **options), scratch=scratch).with_keep(keep)


def made(dtype: torch.dtype = DOUBLE) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """x, the parameters, and factors [T]."""
    draw = torch.Generator().manual_seed(2)
    shapes = {"q": (C, C), "k": (12, C), "v": (12, C), "o": (C, C)}
    params = {f"attn.{n}_w": torch.randn(s, generator=draw, dtype=DOUBLE).mul(0.5) for n, s in shapes.items()}
    x = torch.randn(B, T, C, generator=draw, dtype=DOUBLE)
    factors = 1 + torch.rand(T, generator=draw, dtype=DOUBLE)
    return x.to(dtype).requires_grad_(), {n: t.to(dtype).requires_grad_() for n, t in params.items()}, factors.to(dtype)


@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": "rmsnorm"}, {"qk_norm": "rmsnorm", "qk_place": "row"}], ids=str)
def test_a_factor_of_each_position(scratch: int, options: dict[str, str]) -> None:
    """One for all is the scale of the logits; one of each position is its rows' own."""
    x, params, factors = made()
    plain = BlockSpec(AttentionSpec(4, 2, 6, scale=6**-0.5 * 1.5, **options))  # type: ignore[arg-type]
    y = functional.attention_block(
        x, params, half(scratch=scratch, **options), q_scale=torch.full((T,), 1.5, dtype=DOUBLE)
    )
    expected = functional.attention_block(x, params, plain)
    leaves, dy = [x, *params.values()], torch.randn_like(y)
    pairs = [(y, expected), *zip(*(torch.autograd.grad(out, leaves, dy) for out in (y, expected)), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    rows = functional.attention_block(x, params, half(scratch=scratch, **options), q_scale=factors)
    for t in (3, T - 1):
        one = BlockSpec(AttentionSpec(4, 2, 6, scale=6**-0.5 * float(factors[t]), **options))  # type: ignore[arg-type]
        torch.testing.assert_close(rows[:, t], functional.attention_block(x, params, one)[:, t], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_same_whatever_is_kept(scratch: int, dtype: torch.dtype) -> None:
    """A second backward reads what the first one did: no kept product is scaled in place."""
    x, params, factors = made(dtype)
    leaves, dy, first = [x, *params.values()], torch.randn(B, T, C).to(dtype), None
    for keep in KEEP_PRESETS:
        y = functional.attention_block(x, params, half(keep, scratch), q_scale=factors.expand(B, T))
        for retain in (True, False):
            grads = (y.detach(), *torch.autograd.grad(y, leaves, dy, retain_graph=retain))
            first = grads if first is None else first
            assert all(map(torch.equal, grads, first)), keep


def test_what_does_not_fit_is_refused() -> None:
    x, params, factors = made()
    for given, match in (
        (None, "q_scale: expected a tensor"),
        (factors[1:], r"q_scale: expected shape \[150\] or \[2, 150\], got \[149\]"),
        (factors.expand(3, T), r"got \[3, 150\]"),
        (factors.clone().requires_grad_(), "need no gradient"),
        (factors.long(), "expected floating factors"),
    ):
        with pytest.raises(ValueError, match=match):
            functional.attention_block(x, params, half(), q_scale=given)
    with pytest.raises(ValueError, match="q_scale: expected none"):
        functional.attention_block(x, params, BlockSpec(AttentionSpec(4, 2, 6)), q_scale=factors)
