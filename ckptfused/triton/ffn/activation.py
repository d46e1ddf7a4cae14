"""The FFN's activations and hidden dropout on tiles of accumulators, as csrc/kernels/cpu/activation.inl has them."""

from __future__ import annotations

import triton
import triton.language as tl

from ckptfused.triton.philox import dropout_scale, keep_tile, load_state, philox


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act_with_grad(x, ACT: tl.constexpr):
    """act(x) and its derivative, float32; ACT as Activation in csrc/math/activation.h.

    No value adds to a product, except by fma: the compiler cannot contract it one way in forward and another way in
    backward, so that h has the same bits in both.
    """
    if ACT == "relu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "relu2":  # noqa: RET505  (Triton joins the branches at compile time only in this form)
        r = tl.where(x < 0.0, 0.0, x)
        return r * r, 2.0 * r
    elif ACT == "silu":
        s = _sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == "sigmoid":
        s = _sigmoid(x)
        return s, s * (1.0 - s)
    elif ACT == "quick_gelu":
        s = _sigmoid(1.702 * x)
        value = x * s  # taken with 1 - s before 1.702, so that no product overflows
        return value, tl.fma(value * (1.0 - s), 1.702, s)
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.70710678118654752440))
        pdf = 0.39894228040143267794 * tl.exp(-0.5 * x * x)
        return x * cdf, cdf + x * pdf
    else:
        tl.static_assert(ACT == "gelu_tanh")
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        square = x * x
        s = _sigmoid(1.59576912160573071176 * x * tl.fma(square, 0.044715, 1.0))  # 2 sqrt(2 / pi)
        slope = 1.59576912160573071176 * tl.fma(square, 3.0 * 0.044715, 1.0)
        return x * s, tl.fma(x * s * (1.0 - s), slope, s)


@triton.jit
def hidden_keep(
    rng_state, threshold, m, start, row0, col0, cols, batch, tokens,
    SITE: tl.constexpr, MAPPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """bool [BLOCK_M, BLOCK_N]: which elements of rows m, columns [start, start + BLOCK_N) of a call stay.

    The call's row 0 and column 0 are row0 and col0 of the tensor that the mask belongs to, which has `cols` columns and
    less than 2^31 rows. MAPPED: these lie in memory as [tokens, batch]. ALIGNED: col0 is a multiple of 8, so that a
    tile is whole calls.
    """
    k0, k1, c2, c3 = load_state(rng_state, SITE)
    row = row0 + m
    if MAPPED:
        row = (row % batch) * tokens + row // batch
    first_calls = row.to(tl.int64) * ((cols + 7) // 8)
    if ALIGNED:
        return keep_tile(first_calls, col0 + start, k0, k1, c2, c3, threshold, BLOCK_N, 0, True)
    else:  # noqa: RET505
        col = col0 + start + tl.arange(0, BLOCK_N)[None, :]
        calls = first_calls[:, None] + col // 8
        w0, w1, w2, w3 = philox(calls.to(tl.uint32), (calls >> 32).to(tl.uint32), c2, c3, k0, k1)
        lane = col % 8
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16) >= threshold


@triton.jit
def drop(x, keep, scale):
    """x * scale where kept; 0, also for NaN and infinity, where dropped."""
    return tl.where(keep, x * scale, 0.0)


@triton.jit
def activation(
    g, u, rng_state, threshold, m, start, row0, col0, cols, batch, tokens,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPOUT: tl.constexpr,
    SITE: tl.constexpr, MAPPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h = drop(act(g) * u), or drop(act(u)), in float32; g, u in the storage type."""
    value, _ = act_with_grad((g if GATED else u).to(tl.float32), ACT)
    if GATED:
        value = value * u.to(tl.float32)
    if DROPOUT:
        keep = hidden_keep(
            rng_state, threshold, m, start, row0, col0, cols, batch, tokens, SITE, MAPPED, ALIGNED, BLOCK_N
        )
        value = drop(value, keep, dropout_scale(threshold, tl.float32))
    return value


@triton.jit
def activation_grads(
    g, u, dh, rng_state, threshold, m, start, row0, col0, cols, batch, tokens,
    ACT: tl.constexpr, GATED: tl.constexpr, DROPOUT: tl.constexpr,
    SITE: tl.constexpr, MAPPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h as activation() has it, dg and du from the gradient dh of h (storage type); non-gated: dg is du."""
    value, slope = act_with_grad((g if GATED else u).to(tl.float32), ACT)
    grad = dh.to(tl.float32)
    h = value
    if GATED:
        up = u.to(tl.float32)
        h = value * up
    if DROPOUT:
        keep = hidden_keep(
            rng_state, threshold, m, start, row0, col0, cols, batch, tokens, SITE, MAPPED, ALIGNED, BLOCK_N
        )
        scale = dropout_scale(threshold, tl.float32)
        h = drop(h, keep, scale)
        grad = drop(grad, keep, scale)
    if GATED:
        return h, grad * up * slope, grad * value
    else:  # noqa: RET505
        du = grad * slope
        return h, du, du
