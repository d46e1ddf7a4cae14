"""Checks the arguments of ffn_up_fwd and ffn_up_bwd and starts their kernels.

Works on CPU tensors too, in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptfused.spec import GATE
from ckptfused.triton.ffn.configs import HALF_DTYPES, INTERPRETED_FFN, FFNConfig
from ckptfused.triton.ffn.kernels import ffn_up_bwd_kernel, ffn_up_fwd_kernel
from ckptfused.triton.problem import expect
from ckptfused.triton.tuning import config_for

# Activation -> (the function, whether it is gated).
ACTS: dict[str, tuple[str, bool]] = {act: (gate or act, gate is not None) for act, gate in GATE.items()}
# Within a tile, offsets are of 32 bits: at most 256 rows of this stride.
_MAX_STRIDE = 1 << 22


def _matrix(op: str, name: str, t: Tensor, shape: tuple[int, int], like: Tensor, unit: bool = True) -> None:
    fits = (
        t.shape == shape and t.dtype == like.dtype and t.device == like.device and max(t.stride()) <= _MAX_STRIDE
        and (not unit or shape[1] <= 1 or t.stride(1) == 1)
    )  # fmt: skip
    rows = "contiguous rows and " if unit else ""
    expect(
        fits, op,
        f"{name}: expected {like.dtype} {list(shape)} on {like.device} with {rows}strides up to {_MAX_STRIDE}, "
        f"got {t.dtype} {list(t.shape)} strides {list(t.stride())} on {t.device}",
    )  # fmt: skip


def _weight_strides(
    op: str, name: str, w: Tensor, out: int, into: int, like: Tensor, transposed: bool
) -> tuple[int, int]:
    """Strides along the output and the input features of a weight [out, into], or [into, out] if transposed."""
    _matrix(op, name, w, (into, out) if transposed else (out, into), like, unit=False)
    return (w.stride(1), w.stride(0)) if transposed else (w.stride(0), w.stride(1))


def _bias(op: str, name: str, b: Tensor | None, cols: int, like: Tensor) -> Tensor | None:
    if b is None:
        return None
    fits = b.shape == (cols,) and b.is_floating_point() and b.device == like.device and (cols <= 1 or b.stride(0) == 1)
    expect(
        fits, op, f"{name}: expected a floating [{cols}] on {like.device}, got {b.dtype} {list(b.shape)} on {b.device}"
    )
    return b


def _mask_options(
    op: str, n: int, f: int, rng_state: Tensor | None, device: torch.device, p: float, site: int, cols: int, row0: int,
    col0: int, rows: Sequence[int],
) -> tuple[tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """The kernels' arguments from threshold on, and their options, of the dropout mask's part that the call covers."""
    expect(0.0 <= p <= 1.0, op, f"p: expected a probability in [0, 1], got {p}")
    expect(0 <= site <= 255, op, f"site: expected 0 to 255, got {site}")
    fits = row0 >= 0 and col0 >= 0 and col0 + f <= cols and max(row0 + n, cols) < 1 << 31
    expect(fits, op, f"expected col0 + {f} <= cols and less than 2^31 rows, got row0 {row0}, col0 {col0}, cols {cols}")
    fits = len(rows) == 0 or (len(rows) == 2 and rows[0] * rows[1] >= row0 + n)
    expect(fits, op, f"rows: expected [] or [B, T] with B * T >= {row0 + n}, got {list(rows)}")
    if p > 0.0:
        state = rng_state
        fits = state is not None and state.shape == (2,) and state.dtype == torch.int64 and state.device == device
        came = "none" if state is None else f"{state.dtype} {list(state.shape)} on {state.device}"
        expect(fits, op, f"rng_state: expected Long [2] on {device}, got {came}")
    threshold = round(p * 65536)
    batch, tokens = rows if len(rows) else (1, 1)
    options = {"DROPOUT": threshold > 0, "SITE": site, "MAPPED": len(rows) > 0, "ALIGNED": col0 % 8 == 0}
    return (threshold, row0, col0, cols, batch, tokens), options


def _config(name: str, n: int, c: int, f: int, act: str, like: Tensor) -> FFNConfig:
    return config_for(name, n, c, f, act, like.dtype, like.device) if like.is_cuda else INTERPRETED_FFN


def _start(
    kernel: Any, n: int, f: int, config: FFNConfig, like: Tensor, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    grid = (-(-n // config.block_m) * -(-f // config.block_n),)
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        kernel[grid](
            *args, **options, EVEN_N=f % config.block_n == 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, GROUP_M=config.group_m, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def _check(op: str, name: str, t: Tensor, act: str) -> bool:
    expect(act in ACTS, op, f"act: expected one of {', '.join(ACTS)}, got {act}")
    fits = t.dim() == 2 and t.dtype in HALF_DTYPES and t.shape[0] < 1 << 31
    expect(fits, op, f"{name}: expected BFloat16 or Half [N, C], got {t.dtype} {list(t.shape)}")
    return ACTS[act][1]


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def ffn_up_fwd(
    x: Tensor, gate_w: Tensor | None, up_w: Tensor, gate_b: Tensor | None, up_b: Tensor | None,
    rng_state: Tensor | None, h: Tensor, g: Tensor | None, u: Tensor | None, act: str, transposed: bool, p: float,
    site: int, cols: int, row0: int, col0: int, rows: Sequence[int], config: str = "",
) -> None:  # fmt: skip
    """h = drop(act(g) · u), or drop(act(u)), from g = x Wgᵀ + bg and u = x Wuᵀ + bu rounded to x's type.

    **Shapes**: x [n, C]; weights [f, C], or [C, f] if transposed, any strides; biases [f] of any floating type; h, and
    g and u if they are wanted, [n, f] with contiguous rows. Non-gated: no gate_w, gate_b, g. The mask's arguments as
    those of activation_fwd. config: a name of ffn_configs; "": what tuning.py says.
    """
    op = "ffn_up_fwd"
    gated = _check(op, "x", x, act)
    (n, c), f = x.shape, h.shape[-1]
    expect(gated == (gate_w is not None), op, f"gate_w: expected {'a weight' if gated else 'none'} for {act}")
    expect(gated or (gate_b is None and g is None), op, f"gate_b, g: expected none for {act}")
    _matrix(op, "x", x, (n, c), x)
    for name, t in (("h", h), ("g", g), ("u", u)):
        if t is not None:
            _matrix(op, name, t, (n, f), x)
    gate_strides = _weight_strides(op, "gate_w", gate_w, f, c, x, transposed) if gate_w is not None else (0, 0)
    up_strides = _weight_strides(op, "up_w", up_w, f, c, x, transposed)
    numbers, options = _mask_options(op, n, f, rng_state, x.device, p, site, cols, row0, col0, rows)
    if not n or not f:
        return
    tile = _config(config, n, c, f, act, x)
    args = (
        x, gate_w, up_w, _bias(op, "gate_b", gate_b, f, x), _bias(op, "up_b", up_b, f, x),
        rng_state if options["DROPOUT"] else None, h, g, u,
        n, f, c, x.stride(0), *gate_strides, *up_strides, h.stride(0), _stride(g), _stride(u), *numbers,
    )  # fmt: skip
    options |= {"ACT": ACTS[act][0], "GATED": gated, "EVEN_K": c % tile.block_k == 0}
    _start(ffn_up_fwd_kernel, n, f, tile, x, args, options)


def ffn_up_bwd(
    x: Tensor | None, gate_w: Tensor | None, up_w: Tensor | None, gate_b: Tensor | None, up_b: Tensor | None,
    g: Tensor | None, u: Tensor | None, ddown: Tensor, down_w: Tensor, rng_state: Tensor | None, h: Tensor | None,
    dg: Tensor | None, du: Tensor | None, act: str, transposed: bool, p: float, site: int, cols: int, row0: int,
    col0: int, rows: Sequence[int], config: str = "",
) -> None:  # fmt: skip
    """h again, dg and du, those that are wanted, from dh = ddown · Wdown rounded to ddown's type.

    g and u are made again from x and the weights as ffn_up_fwd makes them, or read where they were kept (u given): then
    x, the weights and the biases are not looked at. dg and du may lie over g and u.

    **Shapes**: as ffn_up_fwd; ddown [n, C]; down_w [C, f], or [f, C] if transposed; g, u, h, dg, du [n, f].
    """
    op = "ffn_up_bwd"
    gated = _check(op, "ddown", ddown, act)
    (n, c), f = ddown.shape, down_w.shape[0 if transposed else 1]
    _matrix(op, "ddown", ddown, (n, c), ddown)
    expect(gated or dg is None, op, f"dg: expected none for {act}, which has no gate")
    for name, t in (("g", g), ("u", u), ("h", h), ("dg", dg), ("du", du)):
        if t is not None:
            _matrix(op, name, t, (n, f), ddown)
    kept = u is not None
    gate_strides = up_strides = (0, 0)
    if kept:
        expect(gated == (g is not None), op, f"g: expected {'a tensor beside u' if gated else 'none'} for {act}")
        x = gate_w = up_w = gate_b = up_b = None
    else:
        expect(x is not None and up_w is not None and g is None, op, "expected either u (and g), or x and up_w")
        expect(gated == (gate_w is not None), op, f"gate_w: expected {'a weight' if gated else 'none'} for {act}")
        expect(gated or gate_b is None, op, f"gate_b: expected none for {act}")
        assert x is not None and up_w is not None
        _matrix(op, "x", x, (n, c), ddown)
        if gate_w is not None:
            gate_strides = _weight_strides(op, "gate_w", gate_w, f, c, ddown, transposed)
        up_strides = _weight_strides(op, "up_w", up_w, f, c, ddown, transposed)
    down_strides = _weight_strides(op, "down_w", down_w, c, f, ddown, transposed)[::-1]
    numbers, options = _mask_options(op, n, f, rng_state, ddown.device, p, site, cols, row0, col0, rows)
    if not n or not f:
        return
    tile = _config(config, n, c, f, act, ddown)
    args = (
        x, gate_w, up_w, _bias(op, "gate_b", gate_b, f, ddown), _bias(op, "up_b", up_b, f, ddown), g, u, ddown, down_w,
        rng_state if options["DROPOUT"] else None, h, dg, du,
        n, f, c, _stride(x), *gate_strides, *up_strides, _stride(g), _stride(u), ddown.stride(0), *down_strides,
        _stride(h), _stride(dg), _stride(du), *numbers,
    )  # fmt: skip
    options |= {"ACT": ACTS[act][0], "GATED": gated, "EVEN_K": c % tile.block_k == 0, "KEPT": kept}
    _start(ffn_up_bwd_kernel, n, f, tile, ddown, args, options)
