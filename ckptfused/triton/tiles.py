"""What the attention kernels share: where a program works, which keys its queries see, and a tile of logits.

Names as in docs/how-it-works.md, "Notation"; m counts queries and n keys of one sequence. Logits are in base 2
(times log2 e), since exp2 is the hardware's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
INF: tl.constexpr = tl.constexpr(float("inf"))

# Kinds of mask, as MaskKind in csrc/kernels/cpu/attention.h.
MASK_NONE: tl.constexpr = tl.constexpr(0)
MASK_KEEP: tl.constexpr = tl.constexpr(1)
MASK_DROP: tl.constexpr = tl.constexpr(2)
MASK_ADD: tl.constexpr = tl.constexpr(3)


@triton.jit
def sequence_bounds(cu_seqlens, sequence, sequences, tokens):
    """Begin and length of sequences; 0 and 0 beyond the last. Numbers out of order give empty ones, no stray reads."""
    there = sequence < sequences
    begin = tl.load(cu_seqlens + sequence, mask=there, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + sequence + 1, mask=there, other=0).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.minimum(tl.maximum(end, begin), tokens)
    return begin, end - begin


@triton.jit
def find_tile(tile, cu_seqlens, sequences, tokens, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Number `tile` of the tiles of all sequences, in order: (its sequence, its number in it, the longest length).

    The host does not know the lengths: it starts as many programs as there could be tiles, and those that are not
    needed get the sequence after the last, whose length is 0.
    """
    sequence = 0
    first = 0  # tiles before that sequence
    before = 0
    longest = 0
    for base in range(0, sequences, LANES):
        lane = base + tl.arange(0, LANES)
        _, length = sequence_bounds(cu_seqlens, lane, sequences, tokens)
        tiles = (length + BLOCK - 1) // BLOCK
        ends = before + tl.cumsum(tiles, 0)
        passed = (ends <= tile) & (lane < sequences)
        sequence += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(length, 0))
    return sequence, tile - first, longest


@triton.jit
def place(program, tiles, heads, cu_seqlens, sequences, queries, keys, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """A program's (tile, head, batch element, sequence, first token, q_len, k_len, longest q_len, longest k_len)."""
    tile = program % tiles
    head = (program // tiles) % heads
    batch = program // tiles // heads
    if PACKED:
        sequence, tile, longest = find_tile(tile, cu_seqlens, sequences, queries, BLOCK, 128)
        begin, length = sequence_bounds(cu_seqlens, sequence, sequences, queries)
        return tile, head, batch, sequence, begin, length, length, longest, longest
    else:  # noqa: RET505  (Triton joins the two at compile time only in this form)
        return tile, head, batch, batch, 0, queries, keys, queries, keys


@triton.jit
def key_ranges(
    m0, q_len, k_len, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """For queries [m0, m0 + BLOCK_M): keys [lo, hi) hold all that some query sees; whole tiles in [full_lo, full_hi)
    are seen by every query, so that nothing in them needs a look at its position. (visible_keys, math/softmax.h.)
    """
    last = tl.minimum(m0 + BLOCK_M, q_len) - 1
    lo = 0
    hi = k_len
    full_lo = 0
    full_hi = k_len
    if CAUSAL:
        hi = tl.minimum(k_len, last + 1)
        full_hi = tl.minimum(k_len, m0 + 1)
    elif WINDOW:
        hi = tl.minimum(k_len, last + window)
        full_hi = tl.minimum(k_len, m0 + window)
    if WINDOW:
        lo = tl.maximum(m0 - window + 1, 0) // BLOCK_N * BLOCK_N
        full_lo = (tl.maximum(last - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_ranges(
    n0, q_len, k_len, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """For keys [n0, n0 + BLOCK_N): queries [lo, hi) hold all that see some key; tiles in [full_lo, full_hi) see every
    key (before k_len; without a window they may reach beyond the last query)."""
    last = tl.minimum(n0 + BLOCK_N, k_len) - 1
    lo = 0
    hi = q_len
    full_lo = 0
    full_hi = q_len
    if CAUSAL:
        lo = n0 // BLOCK_M * BLOCK_M
        full_lo = (last + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    elif WINDOW:
        lo = tl.maximum(n0 - window + 1, 0) // BLOCK_M * BLOCK_M
        full_lo = (tl.maximum(last - window + 1, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if WINDOW:
        hi = tl.minimum(q_len, last + window)
        full_hi = tl.minimum(q_len, n0 + window)
        full_hi = tl.maximum(full_hi // BLOCK_M * BLOCK_M, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def key_order(i, ORDER: tl.constexpr):
    """Which key of a tile stands in column i of a product, or in its row i, where attention drops.

    A thread holds columns 2q and 2q + 1 of each eight of a product of tensor cores, for a q of its own, and rows r and
    r + 8 of sixteen. ORDER 1: each 32 columns are keys 8q to 8q + 7 for each thread, which one Philox call decides. 2:
    each 16 rows are keys 2r and 2r + 1, which one word of a call decides. (A sum over keys does not mind.) 0: as they
    come.
    """
    if ORDER == 1:
        return (i & -32) | ((i & 6) << 2) | ((i & 24) >> 2) | (i & 1)
    elif ORDER == 2:  # noqa: RET505
        return (i & -16) | ((i & 7) << 1) | ((i & 8) >> 3)
    else:
        return i


@triton.jit
def load_rows(
    base, start, count, stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
    ORDER: tl.constexpr = 0,
):  # fmt: skip
    """Rows [start, start + BLOCK) of a [count, HEAD_DIM] matrix as [BLOCK, BLOCK_D], 0 where there is nothing, in
    the ORDER of key_order.

    Only the tile's start is a 64-bit offset: the launcher sees to it that BLOCK · stride fits in 32 bits.
    """
    return load_columns(base, start, count, stride, 0, BLOCK, HEAD_DIM, BLOCK_D, BOUNDED, HEAD_DIM != BLOCK_D, ORDER)


@triton.jit
def load_columns(
    base, start, count, stride, d0,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr, NARROW: tl.constexpr,
    ORDER: tl.constexpr = 0,
):  # fmt: skip
    """Columns [d0, d0 + WIDTH) of those rows. NARROW: some may lie beyond HEAD_DIM."""
    row = key_order(tl.arange(0, BLOCK), ORDER)[:, None]
    d = d0 + tl.arange(0, WIDTH)[None, :]
    at = base + start * tl.cast(stride, tl.int64) + (row * stride + d)
    if BOUNDED and NARROW:
        return tl.load(at, mask=(start + row < count) & (d < HEAD_DIM), other=0.0)
    elif BOUNDED:  # noqa: RET505
        return tl.load(at, mask=start + row < count, other=0.0)
    elif NARROW:
        return tl.load(at, mask=d < HEAD_DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def row_products(
    a, a_start, a_count, a_t, b, b_start, b_count, b_t, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Rows of a times rows of b, [BLOCK_A, BLOCK_B], PIECE columns at a time from memory.

    Without tensor cores a thread multiplies whole rows out of its registers, and rows of 128 or more do not fit. A loop
    that stays one (no static_range) keeps the compiler from loading all pieces of `a` ahead of the caller's loop.
    """
    out = tl.zeros((BLOCK_A, BLOCK_B), ACC)
    for d0 in range(0, BLOCK_D, PIECE):
        a_piece = load_columns(a, a_start, a_count, a_t, d0, BLOCK_A, HEAD_DIM, PIECE, True, HEAD_DIM != BLOCK_D)
        b_piece = load_columns(b, b_start, b_count, b_t, d0, BLOCK_B, HEAD_DIM, PIECE, True, HEAD_DIM != BLOCK_D)
        out = tl.dot(a_piece, tl.trans(b_piece), out, input_precision=PRECISION, out_dtype=ACC)
    return out


@triton.jit
def store_rows(
    base, start, count, stride, value,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ORDER: tl.constexpr = 0,
):  # fmt: skip
    """value [BLOCK, BLOCK_D], its rows in the ORDER of key_order, into rows [start, start + BLOCK) of a
    [count, HEAD_DIM] matrix."""
    row = key_order(tl.arange(0, BLOCK), ORDER)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = base + start * tl.cast(stride, tl.int64) + (row * stride + d)
    tl.store(at, value.to(base.dtype.element_ty), mask=(start + row < count) & (d < HEAD_DIM))


@triton.jit
def scalar(x):
    """x, or what it points to: a Python float reaches a kernel as float32, so float64 comes as a one-element tensor."""
    if x.dtype.is_ptr():
        return tl.load(x)
    else:  # noqa: RET505
        return x


@triton.jit
def tanh(x):
    """tanh to a few units in the last place; float64 near 0 to a few units of 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    if x.dtype == tl.float32:
        y = x * x
        series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        t = tl.where(y < 0.0625, series, t)
    return t


@triton.jit
def masked(s, value, KIND: tl.constexpr):
    """Logits with a mask's values applied; -inf hides whatever the logit is, NaN and +inf too.

    So does an added value of -5e8 or less (float16: its lowest), which would swallow the logit.
    """
    if KIND == MASK_KEEP:
        return tl.where(value != 0, s, -INF)
    elif KIND == MASK_DROP:  # noqa: RET505
        return tl.where(value == 0, s, -INF)
    else:
        bias = value.to(s.dtype)
        lowest = -65504.0 if value.dtype == tl.float16 else -5e8
        return tl.where(bias <= lowest, -INF, s + bias * LOG2E)


@triton.jit
def logits(
    products, shift, m, n, inside, q_len, k_len, scale, softcap, window, mask, mask_m, mask_n, padding, padding_n,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PADDING: tl.constexpr,
    RAW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of products q·k less `shift` (None: nothing), -inf where hidden; and the soft cap's slope (the
    logits again where there is none).

    m, n: the tile's queries and keys, [.., 1] and [1, ..] either way round. RAW: not multiplied by scale · log2 e yet
    (the caller folds that into the subtraction before exp2). BOUNDED: some of the tile may be hidden by its position
    or because it is not `inside` (None: all is).
    """
    if SOFTCAP:
        t = tanh(products * (scale / softcap))
        slope = 1.0 - t * t
        s = t * (softcap * LOG2E)
    elif RAW:
        s = products
        slope = s
    else:
        s = products * (scale * LOG2E)
        slope = s
    if MASK != MASK_NONE:
        at = mask + m.to(tl.int64) * mask_m + n.to(tl.int64) * mask_n
        s = masked(s, tl.load(at, mask=(m < q_len) & (n < k_len), other=0), MASK)
    if PADDING != MASK_NONE:
        s = masked(s, tl.load(padding + n.to(tl.int64) * padding_n, mask=n < k_len, other=0), PADDING)
    if shift is not None:
        s = s - shift
    if BOUNDED:
        seen = n >= 0 if inside is None else inside
        if CAUSAL:
            seen = seen & (n <= m)
        if WINDOW:
            seen = seen & (m - n < window)
            if not CAUSAL:
                seen = seen & (n - m < window)
        s = tl.where(seen, s, -INF)
    return s, slope
