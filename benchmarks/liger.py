"""Liger's kernels in the place of PyTorch's functions: Triton's, for a GPU, where `liger-kernel` is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import EPS, layer_norm, rms_norm
from benchmarks.row_ops import rotated, summed_cross_entropy, swiglu

OP_NAMES = (
    *("rms_norm_forward", "rms_norm_backward", "layer_norm_forward", "layer_norm_backward"),
    *("glu_forward", "glu_backward", "rope_forward", "rope_backward", "cross_entropy_forward"),
)
"""The row kernels that it has; its cross entropy makes loss and gradient in one, whatever is asked for."""


def is_there(device: str) -> bool:
    """Whether it can run on a device."""
    return device == "cuda" and find_spec("liger_kernel") is not None


def instead_of(plain: Any) -> Any:
    """What it has for a function of PyTorch's, called alike. In backward some of its kernels write over what forward
    kept, so that only their time means anything after the first.
    """
    from liger_kernel.transformers import functional

    def norm(x: Tensor, w: Tensor, b: None = None) -> Tensor:
        return functional.liger_rms_norm(x, w, EPS, in_place=False)

    def norm_with_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.liger_layer_norm(x, w, b, EPS)

    def turned(given: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
        tables = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
        return list(functional.liger_rope(*(t.transpose(1, 2) for t in given), *tables))

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return functional.liger_cross_entropy(logits, target, reduction="sum")

    return {
        swiglu: functional.liger_swiglu,
        rms_norm: norm,
        layer_norm: norm_with_mean,
        rotated: turned,
        summed_cross_entropy: summed,
    }[plain]
