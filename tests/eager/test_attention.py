"""The oracle's attention against PyTorch's and against a loop over pairs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ckptfused.eager.attention import attention, position_mask

B, H, G, T, D = 2, 4, 2, 9, 6


def _qkv() -> list[torch.Tensor]:
    return [torch.randn(B, n, T, D, dtype=torch.float64) for n in (H, G, G)]


@pytest.mark.parametrize("kind", ["none", "causal", "keep", "drop", "add"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_matches_pytorch(kind: str, scale: float | None) -> None:
    q, k, v = _qkv()
    allowed = torch.rand(B, 1, T, T) < 0.7
    allowed[..., 0] = True
    given = {"keep": allowed, "drop": ~allowed, "add": torch.randn(1, H, T, T, dtype=torch.float64)}.get(kind)
    mask_kind = "none" if given is None else kind
    o, _ = attention(q, k, v, mask=given, mask_kind=mask_kind, causal=kind == "causal", scale=scale)
    theirs = allowed if kind in ("keep", "drop") else given
    expected = F.scaled_dot_product_attention(q, k, v, theirs, is_causal=kind == "causal", scale=scale, enable_gqa=True)
    torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_position_mask(causal: bool, window: int) -> None:
    mask = position_mask(T, T, causal, window, torch.device("cpu"))
    for i in range(T):
        for j in range(T):
            ahead, behind = j > i, j < i
            near = not window or abs(i - j) < window
            assert mask[i, j] == ((near or (ahead and causal)) and not (ahead and causal)), (i, j, behind)


def test_against_a_loop_with_every_option() -> None:
    q, k, v = _qkv()
    keep = torch.rand(B, H, T, T) < 0.8
    bias = torch.randn(1, 1, T, T, dtype=torch.float64)
    padding = torch.rand(B, T) < 0.3
    padding[:, 0] = False
    p, cap, scale, window = 0.25, 3.0, 0.9, 5
    options = {"mask": bias, "mask_kind": "add", "padding": padding, "padding_kind": "drop", "keep": keep, "p": p}
    o, lse = attention(q, k, v, **options, causal=True, window=window, softcap=cap, scale=scale)
    for b, h, i in ((0, 0, 0), (0, 3, 4), (1, 1, 8), (1, 2, 6)):
        seen = [j for j in range(T) if j <= i and i - j < window and not padding[b, j]]
        logits = [
            cap * math.tanh(scale * float(q[b, h, i] @ k[b, h // 2, j]) / cap) + float(bias[0, 0, i, j]) for j in seen
        ]
        total = sum(map(math.exp, logits))
        row = torch.zeros(D, dtype=torch.float64)
        for j, s in zip(seen, logits, strict=True):
            row += math.exp(s) / total * float(keep[b, h, i, j]) / 0.75 * v[b, h // 2, j]
        torch.testing.assert_close(o[b, h, i], row)
        assert math.isclose(lse[b, h, i], math.log(total) if seen else -math.inf)


@pytest.mark.parametrize("kind", ["keep", "drop", "add"])
def test_fully_masked_rows_are_zero_and_carry_no_gradient(kind: str) -> None:
    q, k, v = (t.requires_grad_() for t in _qkv())
    allowed = torch.ones(1, 1, T, T, dtype=torch.bool)
    allowed[:, :, 4] = False
    mask = {"keep": allowed, "drop": ~allowed, "add": torch.zeros(1, 1, T, T).masked_fill(~allowed, -torch.inf)}[kind]
    o, lse = attention(q, k, v, mask=mask, mask_kind=kind)
    assert (o[:, :, 4] == 0).all()
    assert (lse[:, :, 4] == -torch.inf).all()
    o.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[:, :, 4] == 0).all()  # type: ignore[index]


def test_the_eager_baseline_is_the_same_attention() -> None:
    q, k, v = _qkv()
    mask = torch.randn(1, 1, T, T, dtype=torch.float64)
    options = {"mask": mask, "mask_kind": "add", "causal": True, "window": 4}
    torch.testing.assert_close(attention(q, k, v, **options, fused=True), attention(q, k, v, **options))
