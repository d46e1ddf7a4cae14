"""The FFN's gate and up products with the activation as their epilogue, and the replay that backward needs.

A program makes one [BLOCK_M, BLOCK_N] tile of the hidden tensor. gate_up() is the one place where g and u are made: the
same loop, tile and order in forward and in the replay, hence the same bits. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckptfused.triton.ffn.activation import activation, activation_grads

# Arguments whose value compiles nothing: one kernel serves every number of rows and every place in the mask.
UNSPECIALIZED = ["rows", "threshold", "row0", "col0", "mask_cols", "batch", "tokens"]


@triton.jit
def tile_of(program, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a program's tile. Tiles go in groups of GROUP_M row tiles, column by column: those that
    run at the same time share their operands in the L2 cache."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(cols, BLOCK_N)
    first = program // per_group * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    inside = program % per_group
    return (first + inside % size) * BLOCK_M, inside // size * BLOCK_N


@triton.jit
def load_a(base, m0, k, rows, depth, a_m, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of a row-major operand whose row m0 is at base; beyond the last row that row again.

    Only the start of a tile is a 64-bit offset: the launcher sees to it that a tile spans less than 2^31 elements.
    """
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1 - m0)[:, None]
    kk = tl.arange(0, BLOCK_K)[None, :]
    at = base + k + (m * a_m + kk)
    if EVEN_K:
        return tl.load(at)
    else:  # noqa: RET505  (Triton joins the two at compile time only in this form)
        return tl.load(at, mask=k + kk < depth, other=0.0)


@triton.jit
def load_b(
    base, n0, k, cols, depth, b_n, b_k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of a weight whose column n0 is at base, any strides; 0 where there is nothing."""
    kk = tl.arange(0, BLOCK_K)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    at = base + k * tl.cast(b_k, tl.int64) + (kk * b_k + n * b_n)
    if EVEN_N and EVEN_K:
        return tl.load(at)
    else:  # noqa: RET505
        return tl.load(at, mask=(n0 + n < cols) & (k + kk < depth), other=0.0)


@triton.jit
def finish(acc, bias, n0, cols, BLOCK_N: tl.constexpr, ELEMENT: tl.constexpr):
    """A product's tile with the bias, rounded to the storage type."""
    if bias is None:
        return acc.to(ELEMENT)
    else:  # noqa: RET505
        n = n0 + tl.arange(0, BLOCK_N)
        return (acc + tl.load(bias + n, mask=n < cols, other=0.0).to(tl.float32)[None, :]).to(ELEMENT)


@triton.jit
def pack_pair(g, u, gate_b, up_b, n0, cols, GATED: tl.constexpr, BLOCK_N: tl.constexpr, ELEMENT: tl.constexpr):
    """The finished g and u in one 32-bit word: as 16-bit values each would take a register of its own."""
    held = tl.zeros(u.shape, tl.uint32)
    if n0 < cols:  # a branch, so that the compiler does not load the biases of all parts at once
        held = finish(u, up_b, n0, cols, BLOCK_N, ELEMENT).to(tl.uint16, bitcast=True).to(tl.uint32)
        if GATED:
            high = finish(g, gate_b, n0, cols, BLOCK_N, ELEMENT).to(tl.uint16, bitcast=True).to(tl.uint32)
            held = held | (high << 16)
    return held


@triton.jit
def gate_up(
    x, gate_w, up_w, m0, n0, rows, cols, depth, x_m, gate_n, gate_k, up_n, up_k,
    GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of a tile, in float32, without the biases; non-gated: up's twice."""
    x += m0 * tl.cast(x_m, tl.int64)
    up_w += n0 * tl.cast(up_n, tl.int64)
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        gate_w += n0 * tl.cast(gate_n, tl.int64)
        g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            x_tile = load_a(x, m0, k, rows, depth, x_m, BLOCK_M, BLOCK_K, EVEN_K)
            g = tl.dot(x_tile, load_b(gate_w, n0, k, cols, depth, gate_n, gate_k, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K), g)
            u = tl.dot(x_tile, load_b(up_w, n0, k, cols, depth, up_n, up_k, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K), u)
        return g, u
    else:  # noqa: RET505
        for k in range(0, depth, BLOCK_K):
            x_tile = load_a(x, m0, k, rows, depth, x_m, BLOCK_M, BLOCK_K, EVEN_K)
            u = tl.dot(x_tile, load_b(up_w, n0, k, cols, depth, up_n, up_k, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K), u)
        return u, u


@triton.jit
def load_tile(base, stride, m0, n0, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    base += m0 * tl.cast(stride, tl.int64) + n0
    return tl.load(base + (m * stride + n), mask=(m0 + m < rows) & (n0 + n < cols), other=0.0)


@triton.jit
def store_tile(base, stride, value, m0, n0, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rounds value to the tensor's type and stores it; nothing where the tensor is absent."""
    if base is not None:
        m = tl.arange(0, BLOCK_M)[:, None]
        n = tl.arange(0, BLOCK_N)[None, :]
        base += m0 * tl.cast(stride, tl.int64) + n0
        tl.store(base + (m * stride + n), value.to(base.dtype.element_ty), mask=(m0 + m < rows) & (n0 + n < cols))


@triton.jit
def left_and_right(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns, in the registers where they are."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def quarters(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    left, right = left_and_right(tile, BLOCK_M, BLOCK_N)
    a, b = left_and_right(left, BLOCK_M, BLOCK_N // 2)
    c, d = left_and_right(right, BLOCK_M, BLOCK_N // 2)
    return a, b, c, d


@triton.jit(do_not_specialize=UNSPECIALIZED)
def ffn_up_fwd_kernel(
    x, gate_w, up_w, gate_b, up_b, rng_state, h, g_out, u_out,
    rows, cols, depth, x_m, gate_n, gate_k, up_n, up_k, h_m, g_m, u_m,
    threshold, row0, col0, mask_cols, batch, tokens,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPOUT: tl.constexpr, SITE: tl.constexpr, MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """h [rows, cols], and g and u where wanted, from x [rows, depth]."""
    m0, n0 = tile_of(tl.program_id(0), rows, cols, BLOCK_M, BLOCK_N, GROUP_M)
    g, u = gate_up(
        x, gate_w, up_w, m0, n0, rows, cols, depth, x_m, gate_n, gate_k, up_n, up_k,
        GATED, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    PART: tl.constexpr = BLOCK_N // 4  # a quarter at a time, to stay within the registers
    u_parts = quarters(u, BLOCK_M, BLOCK_N)
    g_parts = u_parts
    if GATED:
        g_parts = quarters(g, BLOCK_M, BLOCK_N)
    for part in tl.static_range(4):
        n = n0 + part * PART
        if n < cols:  # a branch, so that the compiler does not work on all parts at once
            u_tile = finish(u_parts[part], up_b, n, cols, PART, x.dtype.element_ty)
            g_tile = u_tile
            if GATED:
                g_tile = finish(g_parts[part], gate_b, n, cols, PART, x.dtype.element_ty)
            store_tile(g_out, g_m, g_tile, m0, n, rows, cols, BLOCK_M, PART)
            store_tile(u_out, u_m, u_tile, m0, n, rows, cols, BLOCK_M, PART)
            value = activation(
                g_tile, u_tile, rng_state, threshold, m0 + tl.arange(0, BLOCK_M), n, row0, col0, mask_cols, batch,
                tokens, ACT, GATED, DROPOUT, SITE, MAPPED, ALIGNED, PART,
            )  # fmt: skip
            store_tile(h, h_m, value, m0, n, rows, cols, BLOCK_M, PART)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def ffn_up_bwd_kernel(
    x, gate_w, up_w, gate_b, up_b, g_in, u_in, ddown, down_w, rng_state, h, dg, du,
    rows, cols, depth, x_m, gate_n, gate_k, up_n, up_k, gi_m, ui_m, dd_m, down_n, down_k, h_m, dg_m, du_m,
    threshold, row0, col0, mask_cols, batch, tokens,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPOUT: tl.constexpr, SITE: tl.constexpr, MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """h, dg and du [rows, cols], those that are wanted, from ddown [rows, depth] and x; KEPT: from g and u, no x."""
    m0, n0 = tile_of(tl.program_id(0), rows, cols, BLOCK_M, BLOCK_N, GROUP_M)
    ELEMENT: tl.constexpr = ddown.dtype.element_ty
    PART: tl.constexpr = BLOCK_N // 4  # a quarter at a time, to stay within the registers
    if not KEPT:
        g, u = gate_up(
            x, gate_w, up_w, m0, n0, rows, cols, depth, x_m, gate_n, gate_k, up_n, up_k,
            GATED, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        u0, u1, u2, u3 = quarters(u, BLOCK_M, BLOCK_N)
        g0, g1, g2, g3 = u0, u1, u2, u3
        if GATED:
            g0, g1, g2, g3 = quarters(g, BLOCK_M, BLOCK_N)
        held_parts = (
            pack_pair(g0, u0, gate_b, up_b, n0, cols, GATED, PART, ELEMENT),
            pack_pair(g1, u1, gate_b, up_b, n0 + PART, cols, GATED, PART, ELEMENT),
            pack_pair(g2, u2, gate_b, up_b, n0 + 2 * PART, cols, GATED, PART, ELEMENT),
            pack_pair(g3, u3, gate_b, up_b, n0 + 3 * PART, cols, GATED, PART, ELEMENT),
        )
    dd = ddown + m0 * tl.cast(dd_m, tl.int64)
    down_w += n0 * tl.cast(down_n, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        dd_tile = load_a(dd, m0, k, rows, depth, dd_m, BLOCK_M, BLOCK_K, EVEN_K)
        acc = tl.dot(dd_tile, load_b(down_w, n0, k, cols, depth, down_n, down_k, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K), acc)
    dh_parts = quarters(acc, BLOCK_M, BLOCK_N)
    for part in tl.static_range(4):
        n = n0 + part * PART
        if n < cols:  # a branch, so that the compiler does not work on all parts at once
            if KEPT:  # read only now, so that no register holds them through the loop
                u_tile = load_tile(u_in, ui_m, m0, n, rows, cols, BLOCK_M, PART)
                g_tile = u_tile
                if GATED:
                    g_tile = load_tile(g_in, gi_m, m0, n, rows, cols, BLOCK_M, PART)
            else:
                u_tile = (held_parts[part] & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True)
                g_tile = u_tile
                if GATED:
                    g_tile = (held_parts[part] >> 16).to(tl.uint16).to(ELEMENT, bitcast=True)
            h_tile, dg_tile, du_tile = activation_grads(
                g_tile, u_tile, dh_parts[part].to(ELEMENT), rng_state, threshold, m0 + tl.arange(0, BLOCK_M), n, row0,
                col0, mask_cols, batch, tokens, ACT, GATED, DROPOUT, SITE, MAPPED, ALIGNED, PART,
            )  # fmt: skip
            store_tile(h, h_m, h_tile, m0, n, rows, cols, BLOCK_M, PART)
            store_tile(dg, dg_m, dg_tile, m0, n, rows, cols, BLOCK_M, PART)
            store_tile(du, du_m, du_tile, m0, n, rows, cols, BLOCK_M, PART)
