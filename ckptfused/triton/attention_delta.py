"""What attention's backward takes off each row before its gradients are made: a shift of its logits, and delta."""

from __future__ import annotations

import triton
import triton.language as tl

from . import problem
from .tiles import INF, LOG2E, load_rows, place

# shift and delta of a sequence are followed by this many rows without probabilities. A tile that reaches beyond the
# last query reads those, without a mask (which would cost many registers in the layout of a product's columns).
GAP: tl.constexpr = tl.constexpr(problem.GAP)


@triton.jit
def rows_of(sequence, head, heads, begin, queries, sequences, PACKED: tl.constexpr):
    """Where shift and delta of a sequence's head begin."""
    if PACKED:
        return head * (queries + tl.cast(sequences, tl.int64) * GAP) + begin + sequence * GAP
    else:  # noqa: RET505
        return (tl.cast(sequence, tl.int64) * heads + head) * (queries + GAP)


@triton.jit(do_not_specialize=problem.SIZES)
def attention_delta_kernel(
    do, o, lse, shift, delta, cu_seqlens, do_b, do_h, do_t, o_b, o_h, o_t, tiles, heads, queries, sequences,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the other two kernels take off a row's base-2 logits and off its gradients: shift, lse in base 2 but 0 for a
    row without a key (softmax_shift), and delta = Σ do · o."""
    tile, head, batch, sequence, begin, q_len, _, _, _ = place(
        tl.program_id(0), tiles, heads, cu_seqlens, sequences, queries, queries, BLOCK_M, PACKED
    )
    batch = batch.to(tl.int64)
    do += batch * do_b + head * tl.cast(do_h, tl.int64) + begin * tl.cast(do_t, tl.int64)
    o += batch * o_b + head * tl.cast(o_h, tl.int64) + begin * tl.cast(o_t, tl.int64)
    lse += (batch * heads + head) * queries + begin
    rows = rows_of(sequence, head, heads, begin, queries, sequences, PACKED)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    do_tile = load_rows(do, m0, q_len, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(delta.dtype.element_ty)
    o_tile = load_rows(o, m0, q_len, o_t, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(delta.dtype.element_ty)
    sums = tl.load(lse + m, mask=m < q_len, other=0.0)
    tl.store(shift + rows + m, tl.where(sums == -INF, 0.0, sums * LOG2E), mask=m < q_len)
    tl.store(delta + rows + m, tl.sum(do_tile * o_tile, 1), mask=m < q_len)
    gap = tl.arange(0, GAP)
    last = (gap >= 0) & (m0 < q_len) & (m0 + BLOCK_M >= q_len)
    tl.store(shift + rows + q_len + gap, INF, mask=last)
    tl.store(delta + rows + q_len + gap, 0.0, mask=last)
