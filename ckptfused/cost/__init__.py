"""What a block costs: bytes saved for backward, matrix products made and replayed, FLOPs, peak scratch.

Tests hold the extension to these numbers exactly. Notation: B batch, T length, N = B·T tokens, C width. `work` has the
work and the kept values; `walk` goes through a call step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ckptfused.cost.ffn import takes_activation_along
from ckptfused.cost.frame import Call
from ckptfused.cost.walk import BlockWalk
from ckptfused.cost.work import (
    Attention,
    LowRank,
    Product,
    accumulation_type,
    compute_type,
    forward_adapters,
    forward_products,
    kept_bytes,
    kept_values,
    saved_bytes,
)
from ckptfused.spec import BlockSpec, param_names

__all__ = [
    "Attention",
    "LowRank",
    "Product",
    "accumulation_type",
    "backward_flops",
    "backward_scratch",
    "backward_work",
    "compute_type",
    "ffn_tiles",
    "forward_adapters",
    "forward_flops",
    "forward_products",
    "forward_scratch",
    "kept_bytes",
    "kept_values",
    "replayed",
    "saved_bytes",
]

_SCRATCH_LIMIT = 256 << 20  # csrc/autograd/tiles.h
_ROW_ALIGN = _COL_ALIGN = 64


def ffn_tiles(rows: int, width: int, hidden: int, gated: bool, element_size: int) -> tuple[int, int]:
    """Rows and hidden columns of a tile of the FFN half: csrc/autograd/tiles.h, which says why."""
    scratch = (3 if gated else 2) * rows * hidden * element_size
    count = -(-scratch // _SCRATCH_LIMIT)
    if count <= 1:
        return rows, hidden
    narrow = element_size < 4
    row_sums = (3 if gated else 2) * width * hidden * 4 if narrow else 0
    col_sums = rows * width * 4 if narrow else 0

    def step(size: int, align: int) -> int:
        even = -(-size // count)
        return min(size, -(-even // align) * align)

    row_step, col_step = step(rows, _ROW_ALIGN), step(hidden, _COL_ALIGN)
    row_total = scratch // rows * row_step + row_sums
    col_total = scratch // hidden * col_step + col_sums
    if min(row_total, col_total) >= scratch:
        return rows, hidden
    return (row_step, hidden) if row_total <= col_total else (rows, col_step)


def replayed(spec: BlockSpec) -> tuple[str, ...]:
    """Names of the forward's work that backward makes again when every gradient is asked for.

    Never the last product of a pre-norm block: its result is not needed. Where a closing or post norm reads a
    product's result, that product is made again unless it was kept.
    """
    attn, ffn, keep = spec.attn, spec.ffn, spec.keep
    names = []
    if attn is not None:
        mid_needed = not spec.parallel and (ffn is not None or attn.out != "none") and "mid" not in keep
        proj_needed = (mid_needed or attn.post != "none") and "proj" not in keep
        names += ["qkv"] if "qkv" not in keep else []
        names += ["attention"] if "attn" not in keep else []
        names += ["proj"] if proj_needed else []
    if ffn is not None:
        both = ffn.out != "none" and ffn.post != "none"  # what is kept then is the sum alone
        down_needed = ffn.out != "none" or ffn.post != "none"
        names += ["gu"] if "gu" not in keep else []
        names += ["down"] if down_needed and ("out" not in keep or both) else []
    return tuple(names)


def forward_flops(spec: BlockSpec, batch: int, length: int, width: int) -> int:
    """FLOPs of the matrix products, the attention and the adapters of one forward."""
    dims = (batch, length, width)
    return sum(w.flops for w in (*forward_products(spec, *dims).values(), *forward_adapters(spec, *dims).values()))


def _wanted(spec: BlockSpec, needs: Collection[str] | None) -> Collection[str]:
    return ("x", *param_names(spec)) if needs is None else needs


def _walk(call: Call, needs: Collection[str] | None = None, tiled: bool = True) -> BlockWalk:
    spec, tiles = call.spec, (call.batch * call.length, 0)
    if spec.ffn is not None:
        size = compute_type(spec, call.dtype).itemsize
        whole = (tiles[0], spec.ffn.hidden)
        tiles = ffn_tiles(tiles[0], call.width, spec.ffn.hidden, spec.ffn.gated, size) if tiled else whole
    walk = BlockWalk(call, tiles, needs or (), backward=needs is not None)
    if needs is not None:
        walk.run_backward()
    return walk


def backward_work(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    needs: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Product | Attention | LowRank]:
    """The products, attention calls and adapters of one backward in their order, replays included.

    A replay has the name that `forward_products` gives it. `needs`: names of those of `x` and the parameter slots whose
    gradients are asked for; None: all of them. What only other gradients would need is not made.
    `dtype`: the FFN is cut as for an x of it; None: in one piece. A cut FFN with a post or closing norm makes gu twice.
    """
    call = Call(spec, batch, length, width, dtype or torch.float32)
    return _walk(call, _wanted(spec, needs), tiled=dtype is not None).work


def backward_flops(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    needs: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """FLOPs of one backward, replays included; `needs` and `dtype` as in `backward_work`."""
    return sum(work.flops for work in backward_work(spec, batch, length, width, needs, dtype))


def forward_scratch(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    save: bool = True,
    params: Mapping[str, torch.dtype] | None = None,
    lengths: Sequence[int] | None = None,
    rope_copies: int = 0,
    threads: int | None = None,
    device: str = "cpu",
) -> int:
    """The most bytes that one block_fwd holds at a time, its results (y and the kept values) included.

    On the CPU exact but for what is not the block's: what one PyTorch op allocates and frees within itself (the scratch
    of its flash attention and of `sum`; oneDNN's), and a few rows a thread in the row kernels.

    `save`: whether kept values are returned. `params`: the filled slots and their dtypes; None: all, of x's dtype.
    `lengths`: of packed sequences. `rope_copies`: bytes of the copies of cos and sin, made where they are not
    [..., T, rotary_dim / 2] in the accumulation type. `threads`: None, as many as PyTorch has now. `device`: "cpu" or
    "cuda", where neither the platform's workspaces nor the allocator's rounding count, as many multiprocessors are
    assumed as the GPU at hand has (132 without one), and torch.use_deterministic_algorithms as it is now. Whether the
    FFN's products take their activation along is as a block finds it on the current GPU.
    """
    threads = torch.get_num_threads() if threads is None else threads
    one = takes_activation_along(spec, batch, length, width, dtype, device)
    bounds = tuple(lengths or ()) or None
    call = Call(spec, batch, length, width, dtype, params, bounds, rope_copies, threads, device, one)
    walk = _walk(call)
    walk.forward(save)
    return walk.time.peak


def backward_scratch(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    needs: Collection[str] | None = None,
    params: Mapping[str, torch.dtype] | None = None,
    lengths: Sequence[int] | None = None,
    rope_copies: int = 0,
    threads: int | None = None,
    device: str = "cpu",
) -> int:
    """The most bytes that one block_bwd holds at a time, the gradients that it returns included.

    As `forward_scratch`; `needs` as in `backward_work`. What was saved does not count: it was there before.
    """
    threads = torch.get_num_threads() if threads is None else threads
    one = takes_activation_along(spec, batch, length, width, dtype, device)
    bounds = tuple(lengths or ()) or None
    call = Call(spec, batch, length, width, dtype, params, bounds, rope_copies, threads, device, one)
    return _walk(call, _wanted(spec, needs)).time.peak
