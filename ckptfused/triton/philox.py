"""Dropout decisions inside Triton kernels, with the bits of csrc/math/philox.h and csrc/math/dropout.h."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import key_order


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32 with seven rounds: four words. Operands are uint32, tensors or scalars that broadcast.

    A product of 32-bit words is taken in 64 bits: one multiplication gives both halves. What comes of scalars alone
    stays a scalar, made once for all loops: where c0 alone is a tensor, half of the first two rounds.
    """
    for _ in tl.static_range(7):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ (c1 ^ k0)
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ (c3 ^ k1)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def load_state(rng_state, SITE: tl.constexpr):
    """The call's key (two words) and the counter words 2 and 3, from int64[2] (seed, offset)."""
    seed = tl.load(rng_state).to(tl.uint64, bitcast=True)
    offset = tl.load(rng_state + 1).to(tl.uint64, bitcast=True)
    c3 = ((offset >> 32) & 0xFFFFFF).to(tl.uint32) | (SITE << 24)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32), c3


@triton.jit
def keep_tile(
    first_calls, start, k0, k1, c2, c3, threshold, BLOCK_N: tl.constexpr, ORDER: tl.constexpr, WIDE: tl.constexpr
):
    """bool [BLOCK_M, BLOCK_N]: which elements of columns [start, start + BLOCK_N) stay; start a multiple of 8.

    first_calls: int64 [BLOCK_M], the number of each row's first Philox call: row · ⌈cols / 8⌉. ORDER: of the columns,
    as tiles.key_order says. WIDE: numbers of calls of this tensor may need more than 32 bits.

    One call decides eight elements. As the columns come (ORDER 0) the calls' words are laid side by side, through
    shared memory. In another order each element chooses among the words of its call, in a tile [row, .., word, call,
    half of a word] or [row, .., half, call, word]: there the compiler gives each thread the calls of the elements that
    it holds, and nothing moves.
    """
    BLOCK_M: tl.constexpr = first_calls.shape[0]
    CALLS: tl.constexpr = 4 if ORDER == 1 else 2 if ORDER == 2 else 1  # whose words alternate
    column = tl.reshape(tl.arange(0, BLOCK_N // 8), (1, BLOCK_N // 8 // CALLS, CALLS))
    if WIDE:
        calls = first_calls[:, None, None] + (start // 8 + column)
        w0, w1, w2, w3 = philox(calls.to(tl.uint32), (calls >> 32).to(tl.uint32), c2, c3, k0, k1)
    else:
        calls = first_calls.to(tl.uint32)[:, None, None] + (start // 8 + column).to(tl.uint32)
        w0, w1, w2, w3 = philox(calls, 0, c2, c3, k0, k1)
    if ORDER == 0:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., i, j] is word 2i + j
        keep = tl.join((words & 0xFFFF) >= threshold, (words >> 16) >= threshold)
    else:
        word, half = tl.arange(0, 4), tl.arange(0, 2)
        if ORDER == 1:
            word, half = word[None, None, :, None, None], half[None, None, None, None, :]
        else:
            word, half = word[None, None, None, None, :], half[None, None, :, None, None]
        w0, w1 = w0[:, :, None, :, None], w1[:, :, None, :, None]
        w2, w3 = w2[:, :, None, :, None], w3[:, :, None, :, None]
        words = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        # 16 bits ≥ threshold, as one comparison of 32 bits with the number before it, which fits where all is dropped.
        below = ((threshold.to(tl.uint64) << 16) - 1).to(tl.uint32)
        keep = tl.where(half == 0, words << 16, words) > below
    return tl.reshape(keep, (BLOCK_M, BLOCK_N))


@triton.jit
def dropout_scale(threshold, ACC: tl.constexpr):
    """What kept values are multiplied by: 65536 / (65536 - threshold), 0 where all is dropped."""
    kept = tl.cast(65536 - threshold, ACC)
    return tl.where(kept > 0, 65536.0 / tl.maximum(kept, 1.0), 0.0)


@triton.jit
def keep_tile_kernel(
    out, rng_state, rows, cols, threshold,
    SITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr = 0,
    WIDE: tl.constexpr = False,
):  # fmt: skip
    """The keep mask of a [rows, cols] tensor as uint8: what tests compare with ``ckptfused.rng.dropout_mask``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1) * BLOCK_N
    col = start + key_order(tl.arange(0, BLOCK_N), ORDER)
    k0, k1, c2, c3 = load_state(rng_state, SITE)
    keep = keep_tile(row * ((cols + 7) // 8), start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(out + row[:, None] * cols + col[None, :], keep.to(tl.uint8), mask=inside)
