"""Starts the attention kernels. Works on CPU tensors too, in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ckptfused._extension import _C

from .attention_bwd import attention_dkdv_kernel, attention_dq_kernel
from .attention_delta import attention_delta_kernel
from .attention_fwd import attention_fwd_kernel
from .configs import Config, attention_config, block_d, delta_config, option_class
from .problem import Problem, accumulation_type, backward_rows
from .records import Launches

# Of CPU tensors: large enough for the interpreter, small enough for tests to see several of them.
INTERPRETED = Config(32, 64, 4, 1)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _rows(name: str, like: Tensor, packed: bool, launches: Launches) -> Tensor:
    """A tensor of like's shape whose memory is [B, T, heads, D]; zeroed if packed: tokens may belong to no sequence."""
    batch, heads, tokens, dim = like.shape
    make = torch.zeros if packed else torch.empty
    t = make((batch, tokens, heads, dim), dtype=like.dtype, device=like.device).transpose(1, 2)
    return launches.make(name, t, 0.0 if packed else None)


def _number(name: str, value: float, a: Problem, launches: Launches) -> float | Tensor:
    """A number in the form that tiles.scalar takes."""
    if a.q.dtype != torch.float64 and a.q.device.type != "cpu":
        return value
    t = torch.full((1,), value, dtype=accumulation_type(a.q.dtype), device=a.q.device)
    return launches.make(name, t, value)


def _sizes(a: Problem, tokens: int, heads: int, block: int) -> tuple[int, int]:
    """Tiles a head, and programs: a tile of every head of every batch element. The lengths of packed sequences are not
    known here: each may end within a tile, so there are up to as many tiles more."""
    sequences = 0 if a.cu_seqlens is None else a.cu_seqlens.numel() - 1
    tiles = _cdiv(tokens, block) + sequences
    return tiles, tiles * heads * a.q.shape[0]


def _mask_strides(a: Problem) -> tuple[int, ...]:
    return (
        *(a.mask.stride() if a.mask is not None else (0, 0, 0, 0)),
        *(a.padding.stride() if a.padding is not None else (0, 0)),
    )


@lru_cache(maxsize=256)
def _options_of(
    group: int, causal: bool, windowed: bool, capped: bool, mask: int, padding: int, dropout: bool, wide: bool,
    packed: bool, head_dim: int, config: Config,
) -> dict[str, Any]:  # fmt: skip
    return {
        "GROUP": group,
        "CAUSAL": causal,
        "WINDOW": windowed,
        "SOFTCAP": capped,
        "MASK": mask,
        "PADDING": padding,
        "DROPOUT": dropout,
        "WIDE": wide,
        "PACKED": packed,
        "PRECISION": "ieee",  # of float32: exact over fast
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d(head_dim),
        "PIECE": config.piece,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
    }


def _options(a: Problem, config: Config) -> dict[str, Any]:
    """Made once for a kind of call: nobody writes in them."""
    return _options_of(
        a.group, a.causal, a.window > 0, a.softcap > 0.0, a.mask_kind, a.padding_kind, a.threshold > 0, a.wide,
        a.cu_seqlens is not None, a.q.shape[3], config,
    )  # fmt: skip


def _tile(stage: str, a: Problem, capability: tuple[int, int]) -> Config:
    """The tile, chosen by the call and the device alone, so that forward and its replay in backward agree."""
    wide = a.mask is not None and a.mask.element_size() > a.q.element_size()
    special = (a.window > 0, a.softcap > 0.0, a.mask is not None, a.padding is not None, a.cu_seqlens is not None, wide)
    return _tile_of(stage, a.q.dtype, a.q.shape[3], a.threshold > 0, capability, special)


@lru_cache(maxsize=256)
def _tile_of(
    stage: str, dtype: torch.dtype, head_dim: int, dropout: bool, capability: tuple[int, int], special: tuple[bool, ...]
) -> Config:
    return attention_config(stage, dtype, head_dim, dropout, capability, option_class(*special))


def _config(stage: str, a: Problem) -> Config:
    if a.q.device.type == "cpu":
        return INTERPRETED
    return _tile(stage, a, torch.cuda.get_device_capability(a.q.device))


def _scalars(a: Problem, launches: Launches) -> tuple[float | Tensor, float | Tensor, int, int]:
    scale, softcap = _number("scale", a.scale, a, launches), _number("softcap", a.softcap, a, launches)
    return scale, softcap, a.window, a.threshold


def launch_forward(a: Problem, launches: Launches | None = None) -> tuple[Tensor, Tensor]:
    """o [B, H, Tq, D] (memory [B, Tq, H, D]) and lse [B, H, Tq]. launches: where they are recorded."""
    launches = launches or Launches()
    batch, heads, queries, _ = a.q.shape
    keys = a.k.shape[2]
    packed = a.cu_seqlens is not None
    o = _rows("o", a.q, packed, launches)
    lse = torch.empty((batch, heads, queries), dtype=accumulation_type(a.q.dtype), device=a.q.device)
    launches.make("lse", lse.fill_(-torch.inf) if packed else lse, -torch.inf if packed else None)
    config = _config("fwd", a)
    tiles, grid = _sizes(a, queries, heads, config.block_m)
    if not o.numel():
        return o, lse
    sequences = 0 if a.cu_seqlens is None else a.cu_seqlens.numel() - 1
    # Where nothing but the scale lies between products and logits, it goes into the subtraction before exp2. That
    # needs an order that it keeps.
    raw = not a.softcap and a.mask_kind != 3 and a.padding_kind != 3 and a.scale >= _C.attention_least_scale
    launches.start(
        attention_fwd_kernel, grid,
        a.q, a.k, a.v, o, lse, a.mask, a.padding, a.cu_seqlens, a.rng_state,
        *a.q.stride()[:3], *a.k.stride()[:3], *a.v.stride()[:3], *_mask_strides(a),
        *_scalars(a, launches), tiles, heads, queries, keys, sequences, RAW=raw, **_options(a, config),
    )  # fmt: skip
    launches.hand_over(results=2)
    return o, lse


def launch_backward(
    a: Problem, do: Tensor, o: Tensor, lse: Tensor, launches: Launches | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the shapes of q, k, v, their memory [B, T, heads, D]. do and o as problem.operand gives them,
    lse contiguous. launches: where they are recorded."""
    launches = launches or Launches()
    batch, heads, queries, dim = a.q.shape
    kv_heads, keys = a.k.shape[1:3]
    packed = a.cu_seqlens is not None
    dq, dk, dv = (_rows(*each, packed, launches) for each in (("dq", a.q), ("dk", a.k), ("dv", a.v)))
    if not queries or not keys or not dq.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    sequences = 0 if a.cu_seqlens is None else a.cu_seqlens.numel() - 1
    space = (backward_rows(heads, batch * queries, sequences if packed else batch),)
    shift, delta = (launches.make(name, lse.new_empty(space)) for name in ("shift", "delta"))
    config = delta_config(dim)
    tiles, grid = _sizes(a, queries, heads, config.block_m)
    launches.start(
        attention_delta_kernel, grid,
        do, o, lse, shift, delta, a.cu_seqlens, *do.stride()[:3], *o.stride()[:3], tiles, heads, queries, sequences,
        PACKED=packed, HEAD_DIM=dim, BLOCK_M=config.block_m, BLOCK_D=block_d(dim),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    strides = (*do.stride()[:3], *a.q.stride()[:3], *a.k.stride()[:3], *a.v.stride()[:3], *_mask_strides(a))
    scalars = _scalars(a, launches)

    config = _config("dkdv", a)
    tiles, grid = _sizes(a, keys, kv_heads, config.block_n)
    launches.start(
        attention_dkdv_kernel, grid,
        do, a.q, a.k, a.v, shift, delta, dk, dv, a.mask, a.padding, a.cu_seqlens, a.rng_state, *strides,
        *scalars, tiles, kv_heads, queries, keys, sequences, **_options(a, config),
    )  # fmt: skip
    config = _config("dq", a)
    tiles, grid = _sizes(a, queries, heads, config.block_m)
    launches.start(
        attention_dq_kernel, grid,
        do, a.q, a.k, a.v, shift, delta, dq, a.mask, a.padding, a.cu_seqlens, a.rng_state, *strides,
        *scalars, tiles, heads, queries, keys, sequences, **_options(a, config),
    )  # fmt: skip
    launches.hand_over(results=3)
    return dq, dk, dv
