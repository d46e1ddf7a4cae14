"""Weights that are stored in few bits, as numbers again: by bitsandbytes' own kernels for the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptfused.spec import QUANT_SLOTS, BlockSpec

_HALF = (torch.float32, torch.bfloat16, torch.float16)


def dequantize(
    codes: Tensor,
    state: Sequence[Tensor | None],
    kind: str,
    block: int,
    nested: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """A weight [out, in] in `dtype`: each code's value times its block's scale, rounded once.

    **Shapes** as `spec.Quantized`; state: absmax, nested_absmax, nested_code and offset, None where there is none.
    **Source** `bitsandbytes.functional.dequantize_4bit`, whose float32 scales these are; of int8, `MatMul8bitFp`.
    """
    absmax, nested_absmax, nested_code, offset = state
    assert absmax is not None
    if kind == "int8":
        return codes.to(dtype).mul_(absmax.mul(1 / 127)[:, None])
    ops: Any = torch.ops.bitsandbytes
    if nested:
        absmax = ops.dequantize_blockwise(absmax, nested_absmax, nested_code, nested, torch.float32)
        absmax += offset
    codes = codes.view(-1, 1)
    made = dtype if dtype in _HALF else torch.float32
    found: Tensor = ops.dequantize_4bit(codes, absmax.float(), block, kind, sizes, made)
    return found.to(dtype)


@torch.no_grad()
def with_plain_weights(params: dict[str, Any], spec: BlockSpec, x: Tensor) -> dict[str, Any]:
    """The parameters of a block by slot, with numbers in the place of weights that are stored in few bits."""
    if not spec.quantized:
        return params
    found = dict(params)
    dtype = x.dtype if spec.compute is None else getattr(torch, spec.compute)
    for prefix, stored in spec.quantized.items():
        half = prefix.split(".")[0]
        into, out = spec.halves[half].products(x.size(-1))[stored.target]
        state = [params[f"{prefix}.{slot}"] for slot in QUANT_SLOTS]
        slot = f"{half}.{stored.target}_w"
        found[slot] = dequantize(params[slot], state, stored.kind, stored.block, stored.nested, (out, into), dtype)
    return found
