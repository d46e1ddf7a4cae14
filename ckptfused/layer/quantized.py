"""Weights that bitsandbytes stores in few bits, in the block's terms, as they are at this call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import autocast_enabled
from ckptfused.compat.bitsandbytes import (
    LINEAR_4BIT,
    LINEAR_8BIT,
    four_bit_compute_type,
    four_bit_state,
    repacked,
    row_scales,
)
from ckptfused.layer.parts import Reason, weight
from ckptfused.layer.source import as_read, class_name


class Stored(NamedTuple):
    """How a weight is stored: as `spec.Quantized`, the tensors beside it, and the shape [out, in] of the numbers."""

    kind: str
    block: int
    nested: int
    state: tuple[Tensor | None, ...]
    """absmax, nested_absmax, nested_code, offset."""
    shape: tuple[int, int]


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer of bitsandbytes', and runs the code that was read."""
    return class_name(type(module)) in (LINEAR_4BIT, LINEAR_8BIT) and as_read(module)


def stored_weight(module: nn.Module, dtype: torch.dtype, name: str) -> tuple[Tensor, Stored] | Reason:
    """The codes of such a layer's weight and how they are stored, or why it is not fused. dtype: of x.

    **Raises** `RuntimeError` where the layer would silently train without gradients.
    """
    name = name or type(module).__name__
    found = (_four_bits if class_name(type(module)) == LINEAR_4BIT else _eight_bits)(module, dtype, name)
    if not isinstance(found, Reason) and found[0].requires_grad:
        return Reason(f"{name}: its quantized weight asks for a gradient")
    return found


def _four_bits(module: Any, dtype: torch.dtype, name: str) -> tuple[Tensor, Stored] | Reason:
    codes, state = weight(module, "weight"), four_bit_state(module)
    if state is None:
        return Reason(f"{name}: its weight is not quantized yet (move the model to its device)")
    if repacked(state):
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: bitsandbytes packed its 4-bit weight anew in an evaluation on this processor (AVX512-BF16), "
                "and now trains without gradients: load the model again, and evaluate it converted"
            )
        return Reason(f"{name}: bitsandbytes packed its weight for inference", original=True)
    own, wanted = four_bit_compute_type(module, dtype, (torch.float32, torch.bfloat16)), _wanted(codes, dtype)
    if own != wanted:
        return Reason(f"{name} computes in {own} beside {wanted}: load the model with bnb_4bit_compute_dtype={wanted}")
    shape = tuple(state.shape)
    if shape != (module.out_features, module.in_features):
        return Reason(f"{name}: its weight was quantized as {list(shape)}, expected [out, in]")
    if not state.nested:
        if state.absmax.dtype != torch.float32:
            return Reason(f"{name}: its scales are {state.absmax.dtype}, expected float32")
        return codes, Stored(state.quant_type, state.blocksize, 0, (state.absmax, None, None, None), shape)
    inner = state.state2
    beside = (state.absmax, inner.absmax, inner.code, state.offset)
    return codes, Stored(state.quant_type, state.blocksize, inner.blocksize, beside, shape)


def _eight_bits(module: Any, dtype: torch.dtype, name: str) -> tuple[Tensor, Stored] | Reason:
    codes, scales = row_scales(module)
    if codes is None or scales is None or module.state.has_fp16_weights:
        return Reason(f"{name}: its weight is not quantized yet (move the model to its device)")
    if codes.device.type != "cpu":
        return Reason(f"{name} computes in int8 there, outliers apart: the layer is checkpointed as it is")
    if not module.training:
        return Reason(f"{name} computes in int8 in evaluation", original=True)
    return codes, Stored("int8", 0, 0, (scales, None, None, None), (module.out_features, module.in_features))


def _wanted(codes: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of the block's products: that of x, or autocast's."""
    if dtype == torch.float64 or not autocast_enabled(codes):
        return dtype
    return torch.get_autocast_dtype(codes.device.type)
