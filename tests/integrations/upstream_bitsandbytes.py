"""A pytest plugin: bitsandbytes' own tests of `matmul_4bit` multiply by numbers that ckptfused makes of the codes.

In a checkout of bitsandbytes, with this folder on PYTHONPATH:

    python -m pytest -p upstream_bitsandbytes tests/test_autograd.py -k matmul_4bit
"""

from __future__ import annotations

import warnings
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused  # noqa: F401  (registers the operation)
from ckptfused.layer.parts import Reason
from ckptfused.layer.quantized import _four_bits_of
from ckptfused.spec import Quantized


def matmul_4bit(
    x: Tensor, codes: Tensor, quant_state: Any, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x times the weight; transposed codes are those of its transpose."""
    found = _four_bits_of(codes if codes.is_contiguous() else codes.t(), quant_state, "weight")
    assert not isinstance(found, Reason), found
    packed, stored = found
    form = Quantized("", *stored.form).form
    w = torch.ops.ckptfused.dequantize(packed, stored.state, form, stored.shape, x.dtype)
    if transposed := x.size(-1) == w.size(0) != w.size(1):
        warnings.warn("the weight is transposed", DeprecationWarning, stacklevel=2)  # as the library's own does
    y = F.linear(x, w.t() if transposed else w, bias)
    return y if out is None else out.copy_(y)


bitsandbytes.matmul_4bit = matmul_4bit
