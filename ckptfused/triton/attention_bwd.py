"""The backward kernels of attention. No atomics: one program makes each gradient, adding in a fixed order.

Probabilities are made again as exp2(logit - lse), and dropped by the draws that forward used. After the kernel of
attention_delta.py come two: dk and dv (a program a key tile, over the queries that see it), then dq (a program a query
tile, over its keys).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import problem
from .attention_delta import rows_of
from .philox import dropout_scale, keep_tile, load_state
from .tiles import (
    INF,
    key_order,
    key_ranges,
    load_rows,
    logits,
    place,
    query_ranges,
    row_products,
    scalar,
    store_rows,
)


@triton.jit
def _dlogits(p, less, slope, SOFTCAP: tl.constexpr, HIDDEN: tl.constexpr):
    """Gradient of the scaled products; less: dp - delta. HIDDEN: some p are 0 by a mask, and then it is 0 even where dp
    is not finite."""
    ds = p * less
    if HIDDEN:
        ds = tl.where(p == 0.0, 0.0, ds)
    if SOFTCAP:
        ds = ds * slope
    return ds


@triton.jit
def _dkdv_queries(
    dk, dv, k, v, q, do, k_t, v_t, q_t, do_t, shift, delta, lo, hi, n, q_len, k_len, scale, softcap, window,
    mask, mask_m, mask_n, padding, padding_n, row, row_calls, n0, k0, k1, c2, c3, threshold, drop_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PADDING: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Adds the part of queries [lo, hi) of one head to dk and dv. Tiles are [BLOCK_N, BLOCK_M]: the probabilities then
    go into the second product from registers. k, v: the tiles, or with a PIECE where their rows begin."""
    ORDER: tl.constexpr = 2 if DROPOUT and q.dtype.element_ty.primitive_bitwidth == 16 else 0
    nothing = scale * 0.0  # as in forward
    for start in range(lo, hi, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        if DROPOUT:  # first: the draws need many registers for a while
            keep = tl.trans(keep_tile((row + m) * row_calls, n0, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE))
        if PIECE:
            products = row_products(
                k, n0, k_len, k_t, q, start, q_len, q_t, dk.dtype, PRECISION,
                BLOCK_N, BLOCK_M, HEAD_DIM, BLOCK_D, PIECE,
            )  # fmt: skip
        else:
            q_tile = load_rows(q, start, q_len, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            products = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        s, slope = logits(
            products, tl.load(shift + m)[None, :], m[None, :], n[:, None], None, q_len, k_len,
            scale, softcap, window, mask, mask_m, mask_n, padding, padding_n,
            CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, False, BOUNDED,
        )  # fmt: skip
        p = tl.exp2(s)
        if PIECE:
            dp = row_products(
                v, n0, k_len, v_t, do, start, q_len, do_t, dv.dtype, PRECISION,
                BLOCK_N, BLOCK_M, HEAD_DIM, BLOCK_D, PIECE,
            )  # fmt: skip
        do_tile = load_rows(do, start, q_len, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        if not PIECE:
            dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = tl.where(keep, p, nothing)
        dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION, out_dtype=dv.dtype)
        column_delta = tl.load(delta + m)[None, :]
        less = dp - column_delta
        if DROPOUT:  # written so that its multiplication is one with the subtraction
            less = tl.where(keep, dp * drop_scale - column_delta, -column_delta)
        ds = _dlogits(p, less, slope, SOFTCAP, BOUNDED or MASK or PADDING)
        if PIECE:
            q_tile = load_rows(q, start, q_len, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION, out_dtype=dk.dtype)
    return dk, dv


@triton.jit(do_not_specialize=problem.SIZES)
def attention_dkdv_kernel(
    do, q, k, v, shift, delta, dk, dv, mask, padding, cu_seqlens, rng_state,
    do_b, do_h, do_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    mask_b, mask_h, mask_m, mask_n, padding_b, padding_n,
    scale, softcap, window, threshold, tiles, kv_heads, queries, keys, sequences,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dk, dv [B, keys, kv_heads, HEAD_DIM], contiguous; the heads of a group are taken one after the other."""
    ACC: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    tile, kv_head, batch, sequence, begin, q_len, k_len, longest_q, longest_k = place(
        tl.program_id(0), tiles, kv_heads, cu_seqlens, sequences, queries, keys, BLOCK_N, PACKED
    )
    batch = batch.to(tl.int64)
    heads = kv_heads * GROUP
    do += batch * do_b + begin * tl.cast(do_t, tl.int64)
    q += batch * q_b + begin * tl.cast(q_t, tl.int64)
    k += batch * k_b + kv_head * tl.cast(k_h, tl.int64) + begin * tl.cast(k_t, tl.int64)
    v += batch * v_b + kv_head * tl.cast(v_h, tl.int64) + begin * tl.cast(v_t, tl.int64)
    dk += ((batch * keys + begin) * kv_heads + kv_head) * HEAD_DIM
    dv += ((batch * keys + begin) * kv_heads + kv_head) * HEAD_DIM
    if MASK:
        mask += batch * mask_b + begin * (tl.cast(mask_m, tl.int64) + mask_n)
    if PADDING:
        padding += batch * padding_b + begin * tl.cast(padding_n, tl.int64)
    scale = scalar(scale)
    softcap = scalar(softcap)
    k0, k1, c2, c3, drop_scale, row_calls = 0, 0, 0, 0, 1.0, 0
    if DROPOUT:
        k0, k1, c2, c3 = load_state(rng_state, 0)
        drop_scale = dropout_scale(threshold, ACC)
        row_calls = (longest_k + 7) // 8

    n0 = tile * BLOCK_N
    ORDER: tl.constexpr = 2 if DROPOUT and q.dtype.element_ty.primitive_bitwidth == 16 else 0
    n = n0 + key_order(tl.arange(0, BLOCK_N), ORDER)
    if not PIECE:
        k = load_rows(k, n0, k_len, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, True, ORDER)
        v = load_rows(v, n0, k_len, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, True, ORDER)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    lo, full_lo, full_hi, hi = query_ranges(n0, q_len, k_len, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    ONE_RANGE: tl.constexpr = MASK or WINDOW or SOFTCAP or PADDING or PACKED
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row = (tl.cast(sequence, tl.int64) * heads + head) * longest_q
        mask_head = mask
        if MASK:
            mask_head = mask + head * tl.cast(mask_h, tl.int64)
        rows = rows_of(sequence, head, heads, begin, queries, sequences, PACKED)
        # As in forward, but for rows past the last query: the gap and zeros take care of them.
        for part in tl.static_range(3):
            if part == 2 if ONE_RANGE else (part == 1 or (part == 0 and CAUSAL)):
                dk_tile, dv_tile = _dkdv_queries(
                    dk_tile, dv_tile, k, v,
                    q + head * tl.cast(q_h, tl.int64), do + head * tl.cast(do_h, tl.int64), k_t, v_t, q_t, do_t,
                    shift + rows, delta + rows,
                    lo if part == 0 or ONE_RANGE else (full_lo if part == 1 else full_hi),
                    tl.minimum(full_lo, hi) if part == 0 else (full_hi if part == 1 else hi),
                    n, q_len, k_len, scale, softcap, window, mask_head, mask_m, mask_n, padding, padding_n,
                    row, row_calls, n0, k0, k1, c2, c3, threshold, drop_scale,
                    CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, DROPOUT, WIDE, part != 1, PRECISION,
                    HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PIECE,
                )  # fmt: skip
    stride = kv_heads * HEAD_DIM
    store_rows(dk, n0, k_len, stride, dk_tile * scale, BLOCK_N, HEAD_DIM, BLOCK_D, ORDER)
    store_rows(dv, n0, k_len, stride, dv_tile * drop_scale, BLOCK_N, HEAD_DIM, BLOCK_D, ORDER)


@triton.jit
def _dq_keys(
    dq, q, do, row_shift, row_delta, k, v, q_t, do_t, k_t, v_t, lo, hi, m0, m, q_len, k_len, scale, softcap, window,
    mask, mask_m, mask_n, padding, padding_n, first_calls, k0, k1, c2, c3, threshold, drop_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PADDING: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Adds the part of keys [lo, hi) to dq [BLOCK_M, BLOCK_D]. q, do: the tiles, or with a PIECE where their rows
    begin."""
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 16
    ORDER: tl.constexpr = 1 if DROPOUT and HALF and BLOCK_N >= 32 else 0
    for start in range(lo, hi, BLOCK_N):
        n = (start + key_order(tl.arange(0, BLOCK_N), ORDER))[None, :]
        if DROPOUT:
            keep = keep_tile(first_calls, start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE)
        if PIECE:
            products = row_products(
                q, m0, q_len, q_t, k, start, k_len, k_t, dq.dtype, PRECISION,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, PIECE,
            )  # fmt: skip
            dp = row_products(
                do, m0, q_len, do_t, v, start, k_len, v_t, dq.dtype, PRECISION,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, PIECE,
            )  # fmt: skip
        else:
            k_tile = load_rows(k, start, k_len, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, ORDER)
            v_tile = load_rows(v, start, k_len, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, ORDER)
            products = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        s, slope = logits(
            products, row_shift[:, None], m[:, None], n, n < k_len, q_len, k_len, scale, softcap, window,
            mask, mask_m, mask_n, padding, padding_n,
            CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, False, BOUNDED,
        )  # fmt: skip
        p = tl.exp2(s)
        less = dp - row_delta[:, None]
        if DROPOUT:  # written so that its multiplication is one with the subtraction
            less = tl.where(keep, dp * drop_scale - row_delta[:, None], -row_delta[:, None])
        ds = _dlogits(p, less, slope, SOFTCAP, BOUNDED or MASK or PADDING)
        if PIECE:
            k_tile = load_rows(k, start, k_len, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, ORDER)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq


@triton.jit(do_not_specialize=problem.SIZES)
def attention_dq_kernel(
    do, q, k, v, shift, delta, dq, mask, padding, cu_seqlens, rng_state,
    do_b, do_h, do_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    mask_b, mask_h, mask_m, mask_n, padding_b, padding_n,
    scale, softcap, window, threshold, tiles, heads, queries, keys, sequences,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dq [B, queries, heads, HEAD_DIM], contiguous."""
    ACC: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0)
    if CAUSAL:
        program = tl.num_programs(0) - 1 - program
    tile, head, batch, sequence, begin, q_len, k_len, longest_q, longest_k = place(
        program, tiles, heads, cu_seqlens, sequences, queries, keys, BLOCK_M, PACKED
    )
    batch = batch.to(tl.int64)
    kv_head = head // GROUP
    do += batch * do_b + head * tl.cast(do_h, tl.int64) + begin * tl.cast(do_t, tl.int64)
    q += batch * q_b + head * tl.cast(q_h, tl.int64) + begin * tl.cast(q_t, tl.int64)
    k += batch * k_b + kv_head * tl.cast(k_h, tl.int64) + begin * tl.cast(k_t, tl.int64)
    v += batch * v_b + kv_head * tl.cast(v_h, tl.int64) + begin * tl.cast(v_t, tl.int64)
    dq += ((batch * queries + begin) * heads + head) * HEAD_DIM
    rows = rows_of(sequence, head, heads, begin, queries, sequences, PACKED)
    if MASK:
        mask += batch * mask_b + head * tl.cast(mask_h, tl.int64) + begin * (tl.cast(mask_m, tl.int64) + mask_n)
    if PADDING:
        padding += batch * padding_b + begin * tl.cast(padding_n, tl.int64)
    scale = scalar(scale)
    softcap = scalar(softcap)

    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    first_calls = m
    k0, k1, c2, c3, drop_scale = 0, 0, 0, 0, 1.0
    if DROPOUT:
        k0, k1, c2, c3 = load_state(rng_state, 0)
        drop_scale = dropout_scale(threshold, ACC)
        row = (tl.cast(sequence, tl.int64) * heads + head) * longest_q + m
        first_calls = row * ((longest_k + 7) // 8)
    if not PIECE:
        q = load_rows(q, m0, q_len, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        do = load_rows(do, m0, q_len, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    row_shift = tl.load(shift + rows + m, mask=m < q_len, other=INF)
    row_delta = tl.load(delta + rows + m, mask=m < q_len, other=0.0)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    lo, full_lo, full_hi, hi = key_ranges(m0, q_len, k_len, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    ONE_RANGE: tl.constexpr = MASK or (DROPOUT and (WINDOW or SOFTCAP or PADDING or PACKED))
    for part in tl.static_range(3):
        if part == 2 or (not ONE_RANGE and (part == 1 or WINDOW)):
            dq_tile = _dq_keys(
                dq_tile, q, do, row_shift, row_delta, k, v, q_t, do_t, k_t, v_t,
                lo if part == 0 or ONE_RANGE else (full_lo if part == 1 else full_hi),
                tl.minimum(full_lo, hi) if part == 0 else (full_hi if part == 1 else hi),
                m0, m, q_len, k_len, scale, softcap, window, mask, mask_m, mask_n, padding, padding_n,
                first_calls, k0, k1, c2, c3, threshold, drop_scale,
                CAUSAL, WINDOW, SOFTCAP, MASK, PADDING, DROPOUT, WIDE, part != 1, PRECISION,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PIECE,
            )  # fmt: skip
    store_rows(dq, m0, q_len, heads * HEAD_DIM, dq_tile * scale, BLOCK_M, HEAD_DIM, BLOCK_D)
