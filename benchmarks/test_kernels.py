"""Microbenchmarks of the kernels against what PyTorch does for the same result, eagerly and compiled.

    python -m pytest benchmarks/test_kernels.py --benchmark-columns=median

Each op is checked first, against a type whose errors do not show. `extra_info` has the bytes that must move at least,
and their rate over that of a copy; of attention the FLOPs, and their rate over that of a product of matrices.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import attention, row_ops
from benchmarks.ops import Op, Sizes, size

CPU = Sizes(batch=4, tokens=512, width=1024, hidden=2752, heads=16, kv_heads=4, dim=64, chunk=256, vocabulary=32_000)
SIDES: dict[str, Callable[[Any], Any]] = {
    "ckptfused": lambda function: function,
    "eager": lambda function: function,
    "compile": functools.partial(torch.compile, dynamic=False),
}
"""Who computes it, and in what way PyTorch's functions run beside."""
DTYPES = (torch.float32, torch.bfloat16)
DROPPED = 0.1


class Make(row_ops.Make):
    """The row kernels, and attention."""

    def _attention(self, backward: bool, p: float = 0.0) -> Op:
        """Causal attention of one key head for each query head. PyTorch makes its probabilities [T, T] to drop some."""
        s = self.sizes
        sizes = attention.AttentionSizes(dtype=str(self.dtype).removeprefix("torch."), head_dim=s.dim, mask="causal")
        given = [self.normal(s.batch, s.tokens, s.heads, s.dim).transpose(1, 2) for _ in range(4)]
        *qkv, dout = given
        leaves = [t.detach().requires_grad_(backward) for t in qkv]
        made: dict[str, Tensor] = attention.forward(sizes, qkv, p)
        kept = dict(made)

        def sdpa(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)

        plain = self.how(sdpa)
        y = plain(*leaves, p)

        def ours() -> None:
            made.update(attention.backward(sizes, given, kept, p) if backward else attention.forward(sizes, qkv, p))

        def eager() -> object:
            return torch.autograd.grad(y, leaves, dout, retain_graph=True) if backward else plain(*leaves, p)

        def results() -> list[tuple[Tensor, Tensor]]:
            wide = [self.wide(t).requires_grad_() for t in qkv]
            right = dropped(wide, attention.state_of(sizes, p), p)
            grads = torch.autograd.grad(right, wide, self.wide(dout)) if backward else ()
            found = [made[name] for name in ("qkv" if backward else "o")]
            return list(zip(found, grads if backward else (right.detach(),), strict=True))

        products = 5 if backward else 2
        flops = products * s.batch * s.heads * s.tokens**2 * s.dim  # a causal mask hides half of them
        moved = size(*given, made["o"]) if backward else size(*qkv, made["o"])
        return Op(ours, eager, results, moved, flops=flops)

    def attention_forward(self) -> Op:
        return self._attention(backward=False)

    def attention_backward(self) -> Op:
        return self._attention(backward=True)

    def attention_dropout_forward(self) -> Op:
        return self._attention(backward=False, p=DROPPED)

    def attention_dropout_backward(self) -> Op:
        return self._attention(backward=True, p=DROPPED)


def dropped(qkv: list[Tensor], state: Tensor | None, p: float) -> Tensor:
    """Causal attention written out, with the mask that a state draws."""
    q, k, v = qkv
    scores = (q @ k.mT) * q.size(-1) ** -0.5
    probabilities = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    if state is not None:
        keep = torch.ops.ckptfused.dropout_mask([*scores.shape], p, state, 0)
        probabilities = torch.where(keep, probabilities * row_ops.SCALE, 0.0)
    return probabilities @ v


ATTENTION = (*("attention_forward", "attention_backward", "attention_dropout_forward", "attention_dropout_backward"),)


def rate_of(call: Callable[[], object], amount: float) -> float:
    """The amount a second, at the best of 20 calls."""
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return amount / best


@pytest.fixture(scope="module")
def copy_rate() -> float:
    """Bytes per second (read and written) of a large copy."""
    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    return rate_of(lambda: target.copy_(source), size(source, target))


@functools.cache
def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return rate_of(lambda: a @ b, 2 * 2048**3)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [*row_ops.OP_NAMES, *ATTENTION])
def test_op(name: str, side: str, dtype: torch.dtype, benchmark: Any, copy_rate: float) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    op: Op = getattr(Make(CPU, "cpu", dtype, SIDES[side]), name)()
    row_ops.check(name, op, dtype)
    benchmark.group = f"{name}, {dtype}"
    benchmark(op.ours if side == "ckptfused" else op.eager)
    if benchmark.stats is None:
        return
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {"bytes": op.moved, "GB/s": round(op.moved / seconds / 1e9, 2)}
    benchmark.extra_info["of a copy"] = round(op.moved / seconds / copy_rate, 3)
    if op.flops:
        benchmark.extra_info["TFLOP/s"] = round(op.flops / seconds / 1e12, 3)
        benchmark.extra_info["of a product"] = round(op.flops / seconds / product_rate(dtype), 3)
