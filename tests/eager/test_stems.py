"""The oracle's norm, RoPE, activation and dropout against formulas written another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ckptfused.eager.activation import FUNCTIONS, activation
from ckptfused.eager.dropout import dropout, scale_of_kept
from ckptfused.eager.norm import norm
from ckptfused.eager.rope import rope
from ckptfused.spec import ACTIVATIONS, GATED_BY, PLAIN_ACTIVATIONS

X = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_norms() -> None:
    w, b = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    rms = X / (X.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    centred = X - X.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(X, w, b, "layernorm", 1e-5), layer * w + b)
    torch.testing.assert_close(norm(X, w, None, "layernorm", 1e-5), layer * w)
    torch.testing.assert_close(norm(X, w, None, "rmsnorm", 1e-5), rms * w)
    torch.testing.assert_close(norm(X, w, b, "rmsnorm", 1e-5), rms * w + b)
    torch.testing.assert_close(norm(X, w, None, "gemma", 1e-5), rms * (1 + w))
    torch.testing.assert_close(norm(X, None, None, "rmsnorm", 1e-5), rms)
    assert norm(X, w, b, "none", 1e-5) is X


@pytest.mark.parametrize("rotary_dim", [0, 4])
def test_rope_is_a_rotation_of_pairs(rotary_dim: int) -> None:
    x, r = X.unsqueeze(2), (rotary_dim or 8) // 2
    angle = torch.randn(5, r, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    pairs = torch.view_as_complex(x[..., : 2 * r].reshape(3, 5, 1, r, 2))
    between = torch.cat((torch.view_as_real(pairs * turn).flatten(-2), x[..., 2 * r :]), -1)
    torch.testing.assert_close(rope(x, cos, sin, "interleaved", rotary_dim), between)
    halves = torch.complex(x[..., :r], x[..., r : 2 * r]) * turn
    split = torch.cat((halves.real, halves.imag, x[..., 2 * r :]), -1)
    torch.testing.assert_close(rope(x, cos, sin, "half", rotary_dim), split)
    wide = [torch.cat((t, t), -1).expand(3, -1, -1) for t in (cos, sin)]
    torch.testing.assert_close(rope(x, *wide, "half", rotary_dim), split)
    repeated = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    torch.testing.assert_close(rope(x, *repeated, "interleaved", rotary_dim), between)


def test_activations() -> None:
    plain = {
        "relu": nn.ReLU()(X),
        "gelu": X * 0.5 * (1 + torch.erf(X / math.sqrt(2))),
        "gelu_tanh": 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
        "silu": X / (1 + torch.exp(-X)),
        "relu2": X.clamp_min(0) ** 2,
        "quick_gelu": X / (1 + torch.exp(-1.702 * X)),
        "sigmoid": 1 / (1 + torch.exp(-X)),
    }
    assert tuple(plain) == PLAIN_ACTIVATIONS
    for act, expected in plain.items():
        torch.testing.assert_close(activation(None, X, act), expected)
    up = torch.randn_like(X)
    for inner, act in GATED_BY.items():
        torch.testing.assert_close(activation(X, up, act), plain[inner] * up)
        torch.testing.assert_close(FUNCTIONS[act](torch.cat((X, up), -1)), plain[inner] * up)
    by_code = torch.where(X > 0, (0.7 * X + 0.5) * X, 1.25 * (torch.exp(X.clamp(max=-0.1)) - 1 - X) + 0.5 * X)
    torch.testing.assert_close(activation(None, X, "xielu", torch.tensor([0.7, 1.25, 0.5, -0.1])), by_code)
    assert tuple(FUNCTIONS) == ACTIVATIONS


def test_dropout_keeps_the_mean() -> None:
    keep = torch.tensor([True, False])
    x = torch.tensor([3.0, math.nan], dtype=torch.float64)
    assert dropout(x, keep, 0.25).tolist() == [4.0, 0.0]
    assert dropout(x, None, 0.25) is x
    assert scale_of_kept(1.0) == 0.0
    assert scale_of_kept(0.1) == 65536 / (65536 - 6554)
