"""Microbenchmarks of the small ops against what eager PyTorch does for the same result.

    python -m pytest benchmarks/test_kernels.py

Each op is checked against eager first. ``extra_info`` (and the last column of the report with ``--benchmark-columns``)
holds the bytes that the op must move at least, the rate achieved, and that rate over the measured copy bandwidth.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)
from benchmarks.gpu.ops import Op, size
from ckptfused.cli.models import rope_tables, rotate

ops = torch.ops.ckptfused
ROWS, WIDTH, HIDDEN, HEADS, TOKENS = 2048, 1024, 2752, 16, 512
DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def norm_forward(dtype: torch.dtype) -> Op:
    x, w, y = normal(ROWS, WIDTH, dtype=dtype), torch.rand(WIDTH).to(dtype), torch.empty(ROWS, WIDTH, dtype=dtype)

    def eager() -> Tensor:
        return F.rms_norm(x, (WIDTH,), w, 1e-5)

    return Op(lambda: ops.norm_fwd(x, w, None, y, "rmsnorm", 1e-5), eager, lambda: [(y, eager())], size(x, y))


def norm_backward(dtype: torch.dtype) -> Op:
    x, w = normal(ROWS, WIDTH, dtype=dtype).requires_grad_(), torch.rand(WIDTH).to(dtype).requires_grad_()
    dy, dx, dw = normal(ROWS, WIDTH, dtype=dtype), torch.empty(ROWS, WIDTH, dtype=dtype), torch.empty(WIDTH)
    partials = torch.empty(ops.grad_chunks(dy, ROWS, WIDTH, 0), WIDTH)
    y = F.rms_norm(x, (WIDTH,), w, 1e-5)
    plain, weight = x.detach(), w.detach()

    def eager() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, w), dy, retain_graph=True)

    def ours() -> None:
        ops.norm_bwd(dy, plain, weight, None, dx, partials, None, "rmsnorm", 1e-5)
        ops.sum_grads([partials], [dw])

    return Op(
        ours,
        eager,
        lambda: list(zip((dx, dw), eager(), strict=True)),
        size(dy, x, dx),
    )


def residual_forward(dtype: torch.dtype) -> Op:
    """x + drop(f), and its norm, with dropout 0.1; eager: dropout, add, norm."""
    x, f, w = normal(ROWS, WIDTH, dtype=dtype), normal(ROWS, WIDTH, dtype=dtype), torch.rand(WIDTH).to(dtype)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    state = ops.rng_state(x, 0)
    keep, scale = ops.dropout_mask([ROWS, WIDTH], 0.1, state, 1), 65536 / (65536 - round(0.1 * 65536))

    def ours() -> None:
        ops.residual_fwd(
            x, f, state, None, None, w, None, total, normed, "none", 1e-5, "rmsnorm", 1e-5, 1.0, 0.1, 1, []
        )

    def eager() -> Tensor:
        return F.rms_norm(x + F.dropout(f, 0.1), (WIDTH,), w, 1e-5)

    def results() -> list[tuple[Tensor, Tensor]]:
        expected = (x.float() + torch.where(keep, f.float() * scale, 0.0)).to(dtype)
        return [(total, expected), (normed, F.rms_norm(expected, (WIDTH,), w, 1e-5))]

    return Op(ours, eager, results, size(x, f, total, normed))


def residual_backward(dtype: torch.dtype) -> Op:
    """The gradient of f through dropout 0.1; eager: a product with the scaled mask that it kept."""
    ds = normal(ROWS, WIDTH, dtype=dtype)
    df = torch.empty_like(ds)
    state = ops.rng_state(ds, 0)
    scale = 65536 / (65536 - round(0.1 * 65536))
    mask = ops.dropout_mask([ROWS, WIDTH], 0.1, state, 1)
    kept = mask.to(dtype)

    def eager() -> Tensor:
        return ds * kept * scale

    return Op(
        lambda: ops.residual_bwd(ds, None, state, None, df, None, None, "none", 1e-5, 1.0, 0.1, 1, []),
        eager,
        lambda: [(df, torch.where(mask, ds.float() * scale, 0.0).to(dtype))],
        size(ds, df),
    )


def activation_forward(dtype: torch.dtype) -> Op:
    g, u = normal(ROWS, HIDDEN, dtype=dtype), normal(ROWS, HIDDEN, dtype=dtype)
    h = torch.empty_like(g)

    def eager() -> Tensor:
        return F.silu(g) * u

    return Op(
        lambda: ops.activation_fwd(g, u, None, h, "swiglu", 0.0, 2, HIDDEN, 0, 0, []),
        eager,
        lambda: [(h, (F.silu(g.float()) * u.float()).to(dtype))],
        size(g, u, h),
    )


def activation_backward(dtype: torch.dtype) -> Op:
    """h, dg, du from g, u, dh in one pass."""
    g, u = (normal(ROWS, HIDDEN, dtype=dtype).requires_grad_() for _ in range(2))
    dh = normal(ROWS, HIDDEN, dtype=dtype)
    h, dg, du = (torch.empty_like(dh) for _ in range(3))
    gate, up = g.detach(), u.detach()

    def eager() -> tuple[Tensor, ...]:
        y = F.silu(g) * u
        return y, *torch.autograd.grad(y, (g, u), dh)

    def results() -> list[tuple[Tensor, Tensor]]:
        wide = [tensor.detach().float().requires_grad_() for tensor in (g, u)]
        y = F.silu(wide[0]) * wide[1]
        expected = [y.detach(), *torch.autograd.grad(y, wide, dh.float())]
        return [(ours, theirs.to(dtype)) for ours, theirs in zip((h, dg, du), expected, strict=True)]

    def ours() -> None:
        ops.activation_bwd(gate, up, dh, None, h, dg, du, "swiglu", 0.0, 2, HIDDEN, 0, 0, [])

    return Op(ours, eager, results, size(g, u, dh, h, dg, du))


def rope(dtype: torch.dtype) -> Op:
    batch, dim = ROWS // TOKENS, WIDTH // HEADS
    x = normal(batch, TOKENS, HEADS, dim, dtype=dtype)
    y = torch.empty_like(x)
    cos, sin = rope_tables(TOKENS, dim, 1e4)
    heads, tables = x.transpose(1, 2), (cos.to(dtype), sin.to(dtype))

    def results() -> list[tuple[Tensor, Tensor]]:
        return [(y, rotate(heads.float(), cos, sin).transpose(1, 2).to(dtype))]

    return Op(
        lambda: ops.qk_fwd(x, None, None, cos[None], sin[None], y, "none", 1e-5, "half", 0),
        lambda: rotate(heads, *tables),
        results,
        size(x, y),
    )


def attention_arguments(dtype: torch.dtype) -> tuple[list[Tensor], float]:
    batch, dim = ROWS // TOKENS, WIDTH // HEADS
    q, k, v = (normal(batch, TOKENS, HEADS, dim, dtype=dtype).transpose(1, 2) for _ in range(3))
    return [q, k, v], dim**-0.5


def attention_forward(dtype: torch.dtype) -> Op:
    (q, k, v), scale = attention_arguments(dtype)
    held: list[Tensor] = []

    def ours() -> None:
        held[:] = ops.attention_fwd(q, k, v, None, None, None, None, "none", "none", scale, True, 0, 0.0, 0.0)

    def eager() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Op(ours, eager, lambda: [(held[0], eager())], size(q, k, v, q))


def attention_with_dropout(dtype: torch.dtype) -> Op:
    """Forward with dropout 0.1 on the probabilities, which PyTorch does through the T×T matrix."""
    (q, k, v), scale = attention_arguments(dtype)
    state = ops.rng_state(q, 0)
    held: list[Tensor] = []

    def ours() -> None:
        held[:] = ops.attention_fwd(q, k, v, None, None, None, state, "none", "none", scale, True, 0, 0.0, 0.1)

    def eager() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)

    def results() -> list[tuple[Tensor, Tensor]]:
        batch, heads, tokens, _ = q.shape
        keep = ops.dropout_mask([batch, heads, tokens, tokens], 0.1, state, 0)
        scores = (q.float() @ k.float().transpose(-1, -2)) * scale
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf"))
        factor = 65536 / (65536 - round(0.1 * 65536))
        o = torch.where(keep, scores.softmax(-1) * factor, 0.0) @ v.float()
        return [(held[0], o.to(dtype))]

    return Op(ours, eager, results, size(q, k, v, q))


OPS = {
    build.__name__: build
    for build in (
        norm_forward,
        norm_backward,
        residual_forward,
        residual_backward,
        activation_forward,
        activation_backward,
        rope,
        attention_forward,
        attention_with_dropout,
    )
}


@pytest.fixture(scope="module")
def copy_rate() -> float:
    """Bytes per second (read and written) of a large copy: the best of 20."""
    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return size(source, target) / best


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("side", ["ckptfused", "eager"])
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, side: str, dtype: torch.dtype, benchmark, copy_rate: float) -> None:
    torch.manual_seed(0)
    op = OPS[name](dtype)
    op.ours()
    for found, expected in op.results():
        # Same values up to rounding of dtype, by norm: an ulp each for two roundings, four for the sums inside.
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error <= 4 * torch.finfo(dtype).eps, f"{name}: relative error {error:.3g}"
    benchmark.group = f"{name}, {dtype}"
    benchmark(op.ours if side == "ckptfused" else op.eager)
    if benchmark.stats is not None:
        rate = op.moved / benchmark.stats.stats.median
        benchmark.extra_info |= {
            "bytes": op.moved,
            "GB/s": round(rate / 1e9, 2),
            "of copy bandwidth": round(rate / copy_rate, 3),
        }
