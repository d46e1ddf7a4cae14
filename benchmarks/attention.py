"""Attention on the CPU, forward and backward, beside PyTorch's kernel: without dropout, and with it.

PyTorch's kernel has no dropout: with dropout the ratio is to PyTorch's without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Column, Rows, Sizes, Steps, option, ratio
from benchmarks.checks import worst_error

PLAIN, OURS, DROPPED = "PyTorch's", "ckptfused", "ckptfused, dropout 0.1"
CHECKED_TOKENS = 320  # more than one tile, compared with float64
FORWARD, BACKWARD = torch.ops.ckptfused.attention_fwd, torch.ops.ckptfused.attention_bwd
_ATEN = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class AttentionSizes(Sizes):
    """One sequence of 8 heads."""

    dtype: str = option("bfloat16", "float32")
    head_dim: int = option(64, 128)
    tokens: int = option(512, 2048, 8192)
    mask: str = option("causal", "full")


def operands(sizes: AttentionSizes, tokens: int) -> list[Tensor]:
    """q, k, v and the output's gradient, [1, 8, T, D] as a projection leaves them."""
    shape = 1, tokens, 8, sizes.head_dim
    return [torch.randn(shape).to(getattr(torch, sizes.dtype)).transpose(1, 2) for _ in range(4)]


def state_of(sizes: AttentionSizes, p: float) -> Tensor | None:
    """Whence dropout's mask is drawn."""
    return torch.tensor([sizes.seed, 0]) if p else None


def _options(sizes: AttentionSizes, p: float) -> tuple[Any, ...]:
    state = state_of(sizes, p)
    return None, None, None, state, "none", "none", sizes.head_dim**-0.5, sizes.mask == "causal", 0, 0.0, p


def forward(sizes: AttentionSizes, qkv: Sequence[Tensor], p: float = 0.0) -> dict[str, Tensor]:
    """Output and log-sum-exp of our kernel, of q, k and v."""
    return dict(zip(("o", "lse"), FORWARD(*qkv, *_options(sizes, p)), strict=True))


def backward(
    sizes: AttentionSizes, given: Sequence[Tensor], kept: dict[str, Tensor], p: float = 0.0
) -> dict[str, Tensor]:
    """Gradients of our kernel, of q, k, v and the output's gradient, from what its forward made."""
    *qkv, dout = given
    return dict(zip("qkv", BACKWARD(dout, *qkv, kept["o"], kept["lse"], *_options(sizes, p)), strict=True))


def ours(sizes: AttentionSizes, given: Sequence[Tensor], p: float = 0.0) -> dict[str, Tensor]:
    """Output and gradients of our kernels, of q, k, v and the output's gradient."""
    made = forward(sizes, given[:3], p)
    return {"o": made["o"], **backward(sizes, given, made, p)}


def pytorch(sizes: AttentionSizes, given: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same of the kernel that `scaled_dot_product_attention` takes on a CPU."""
    q, k, v, dout = given
    causal = sizes.mask == "causal"
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)
    return dict(zip("oqkv", (out, *grads), strict=True))


def check(sizes: AttentionSizes, steps: Any = None) -> str:
    """Raises unless output and gradients are right; returns what was shown."""
    torch.manual_seed(sizes.seed)
    given = operands(sizes, CHECKED_TOKENS)
    exact = pytorch(sizes, [t.double() for t in given])
    worst = worst_error(exact, pytorch(sizes, given), ours(sizes, given), given[0].dtype)
    return f"at most {worst:.2f} of the allowed error against float64"


def variants(sizes: AttentionSizes) -> Steps:
    given = operands(sizes, sizes.tokens)
    return {
        PLAIN: lambda: pytorch(sizes, given),
        OURS: lambda: ours(sizes, given),
        DROPPED: lambda: ours(sizes, given, p=0.1),
    }


def figures(sizes: AttentionSizes, steps: Steps) -> Rows:
    """FLOPs of a step: 2 products of forward and 5 of backward, half of them where a causal mask hides as many."""
    flops = 7 * 2 * 8 * sizes.tokens**2 * sizes.head_dim / (2 if sizes.mask == "causal" else 1)
    return {name: {"flops": flops} for name in steps}


def rate(row: dict[str, Any], rows: Rows) -> str:
    return f"{row['flops'] / row['median'] / 1e9:.0f}"


BENCHMARK = Benchmark(
    name="attention",
    doc=__doc__,
    sizes=AttentionSizes(),
    variants=variants,
    check=check,
    figures=figures,
    columns=(Column("GFLOP/s", rate), ratio("ratio", PLAIN)),
    case=lambda sizes: f"{sizes.dtype}, heads of {sizes.head_dim}, {sizes.tokens} tokens, {sizes.mask}",
    shape=lambda sizes, rows: "One sequence, 8 heads, forward and backward.",
    budget=3.0,
)
