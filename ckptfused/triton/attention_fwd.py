"""The forward kernel of attention: flash attention (Dao et al. 2022, 2023) with every option of the block.

A program makes BLOCK_M queries of one head, over the key tiles that they see, in order of the keys. No result depends
on when or where a program runs, so that running the kernel again rebuilds o and lse to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import problem
from .philox import dropout_scale, keep_tile, load_state
from .tiles import INF, LN2, LOG2E, key_order, key_ranges, load_rows, logits, place, row_products, scalar, store_rows


@triton.jit
def _fwd_keys(
    out, total, top, q, k, v, q_t, k_t, v_t, lo, hi, m0, m, q_len, k_len, scale, softcap, window,
    mask, mask_m, mask_n, padding, padding_n, first_calls, k0, k1, c2, c3, threshold,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PADDING: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, RAW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Takes keys [lo, hi) into out [BLOCK_M, BLOCK_D], the sums of exp2 and the running maximum [BLOCK_M].

    q: the tile, or with a PIECE where the rows of q begin.
    """
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 16
    ORDER: tl.constexpr = 1 if DROPOUT and HALF and BLOCK_N >= 32 else 0
    nothing = scale * 0.0  # a 0 that the compiler does not know: else it chooses after rounding, half a word at a time
    for start in range(lo, hi, BLOCK_N):
        n = (start + key_order(tl.arange(0, BLOCK_N), ORDER))[None, :]
        if DROPOUT:  # before the product: the draws need many registers for a while
            keep = keep_tile(first_calls, start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE)
        if PIECE:
            products = row_products(
                q, m0, q_len, q_t, k, start, k_len, k_t, out.dtype, PRECISION,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, PIECE,
            )  # fmt: skip
        else:
            k_tile = load_rows(k, start, k_len, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, ORDER)
            products = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        s, _ = logits(
            products, None, m[:, None], n, n < k_len, q_len, k_len, scale, softcap, window,
            mask, mask_m, mask_n, padding, padding_n,
            CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, RAW, BOUNDED,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new_top == -INF, 0.0, new_top)
        if RAW:
            factor = scale * LOG2E
            p = tl.exp2(s * factor - (shift * factor)[:, None])
            rescale = tl.exp2((top - shift) * factor)
        else:
            p = tl.exp2(s - shift[:, None])
            rescale = tl.exp2(top - shift)
        top = new_top
        total = total * rescale + tl.sum(p, 1)
        out = out * rescale[:, None]
        if DROPOUT:
            p = tl.where(keep, p, nothing)
        v_tile = load_rows(v, start, k_len, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, ORDER)
        out = tl.dot(p.to(v_tile.dtype), v_tile, out, input_precision=PRECISION, out_dtype=out.dtype)
    return out, total, top


@triton.jit(do_not_specialize=problem.SIZES)
def attention_fwd_kernel(
    q, k, v, o, lse, mask, padding, cu_seqlens, rng_state,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    mask_b, mask_h, mask_m, mask_n, padding_b, padding_n,
    scale, softcap, window, threshold, tiles, heads, queries, keys, sequences,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """o [B, queries, heads, HEAD_DIM] and lse [B, heads, queries], both contiguous; q, k, v as their strides say."""
    ACC: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0)
    if CAUSAL:
        program = tl.num_programs(0) - 1 - program  # the tiles with the most keys first
    tile, head, batch, sequence, begin, q_len, k_len, longest_q, longest_k = place(
        program, tiles, heads, cu_seqlens, sequences, queries, keys, BLOCK_M, PACKED
    )
    batch = batch.to(tl.int64)
    kv_head = head // GROUP
    q += batch * q_b + head * tl.cast(q_h, tl.int64) + begin * tl.cast(q_t, tl.int64)
    k += batch * k_b + kv_head * tl.cast(k_h, tl.int64) + begin * tl.cast(k_t, tl.int64)
    v += batch * v_b + kv_head * tl.cast(v_h, tl.int64) + begin * tl.cast(v_t, tl.int64)
    o += ((batch * queries + begin) * heads + head) * HEAD_DIM
    lse += (batch * heads + head) * queries + begin
    if MASK:
        mask += batch * mask_b + head * tl.cast(mask_h, tl.int64) + begin * (tl.cast(mask_m, tl.int64) + mask_n)
    if PADDING:
        padding += batch * padding_b + begin * tl.cast(padding_n, tl.int64)
    scale = scalar(scale)
    softcap = scalar(softcap)

    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    first_calls = m
    k0, k1, c2, c3 = 0, 0, 0, 0
    if DROPOUT:
        k0, k1, c2, c3 = load_state(rng_state, 0)
        row = (tl.cast(sequence, tl.int64) * heads + head) * longest_q + m
        first_calls = row * ((longest_k + 7) // 8)
    if not PIECE:
        q = load_rows(q, m0, q_len, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    out = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    total = tl.zeros((BLOCK_M,), ACC)
    top = tl.full((BLOCK_M,), -INF, ACC)

    lo, full_lo, full_hi, hi = key_ranges(m0, q_len, k_len, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    # Three ranges of keys; the outer two may hold hidden ones. (static_range: three copies of the loop.) What
    # the copies share stays in registers over all of them: where those are short, one range, as if any may be hidden.
    ONE_RANGE: tl.constexpr = MASK or (DROPOUT and (WINDOW or SOFTCAP or PADDING or PACKED))
    for part in tl.static_range(3):
        if part == 2 or (not ONE_RANGE and (part == 1 or WINDOW)):
            out, total, top = _fwd_keys(
                out, total, top, q, k, v, q_t, k_t, v_t,
                lo if part == 0 or ONE_RANGE else (full_lo if part == 1 else full_hi),
                tl.minimum(full_lo, hi) if part == 0 else (full_hi if part == 1 else hi),
                m0, m, q_len, k_len, scale, softcap, window, mask, mask_m, mask_n, padding, padding_n,
                first_calls, k0, k1, c2, c3, threshold,
                CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, DROPOUT, WIDE, RAW, part != 1, PRECISION,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PIECE,
            )  # fmt: skip

    empty = total == 0.0  # every key hidden
    total = tl.where(empty, 1.0, total)
    factor = 1.0 / total
    if RAW:
        top = top * (scale * LOG2E)
    if DROPOUT:
        factor = factor * dropout_scale(threshold, ACC)
    out = out * factor[:, None]  # 0 in an empty row
    store_rows(o, m0, q_len, heads * HEAD_DIM, out, BLOCK_M, HEAD_DIM, BLOCK_D)
    tl.store(lse + m, tl.where(empty, -INF, (top + tl.log2(total)) * LN2), mask=m < q_len)
