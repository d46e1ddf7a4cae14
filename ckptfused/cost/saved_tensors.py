"""What a block call saves for backward: its input, the random state, and the values that its keep set names."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ckptfused.spec import BlockSpec
from ckptfused.triton.problem import accumulation_type

RNG_STATE_BYTES = 16


def compute_type(spec: BlockSpec, dtype: torch.dtype) -> torch.dtype:
    """The type of the matrix products of a block whose x has this dtype."""
    return dtype if spec.compute is None else getattr(torch, spec.compute)


def kept_values(
    spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that block_fwd returns for backward, in its order.

    **Shapes** Batch-first for `o`, [B, T, H·D], and `lse`, [B, H, T]; the others follow the layout of x.
    """
    compute, acc = compute_type(spec, dtype), accumulation_type(dtype)
    lead = (length, batch) if spec.seq_first else (batch, length)
    values: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in spec.keep:
        if name == "attn":
            assert spec.attn is not None
            values["o"] = ((batch, length, spec.attn.q_width), compute)
            values["lse"] = ((batch, spec.attn.heads, length), acc)
        elif name == "mid":
            values["mid"] = ((*lead, width), dtype)
        elif name == "proj":
            values["proj"] = ((*lead, width), compute)
        elif name == "qkv":
            assert spec.attn is not None
            values["qkv"] = ((*lead, spec.attn.qkv_width), compute)
        elif name == "gu":
            assert spec.ffn is not None
            values["gu"] = ((*lead, spec.ffn.gu_width), compute)
        elif name == "out":
            assert spec.ffn is not None
            values["out"] = ((*lead, width), dtype if spec.ffn.out != "none" else compute)
    return values


def _bytes(shape: Collection[int], dtype: torch.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def kept_bytes(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the kept values of one call."""
    return sum(_bytes(shape, kind) for shape, kind in kept_values(spec, batch, length, width, dtype).values())


def saved_bytes(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that one call holds until backward: x, the random state where some p > 0, and the kept values.

    Parameters and tensors that the caller owns (masks, cos, sin, cu_seqlens) do not count.
    """
    rng = RNG_STATE_BYTES if spec.has_dropout else 0
    return _bytes((batch, length, width), dtype) + rng + kept_bytes(spec, batch, length, width, dtype)
