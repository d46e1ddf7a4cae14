"""Closed forms for the loss head: what it multiplies and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ckptfused.cost.work import accumulation_type
from ckptfused.spec import LossSpec

Shape = Sequence[int]


def loss_flops(spec: LossSpec, x: Shape, weight: Shape, needs: Sequence[bool], *, backward: bool, kept: bool) -> int:
    """FLOPs of the products of one forward or backward, adapters included.

    x [..., C] and weight [V, C] are shapes. needs: whether the gradients of x, weight, bias and each adapter's a, b and
    bias are asked for of this call. kept: of a backward, whether forward made them, so that nothing is multiplied.
    """
    if backward and kept:
        return 0
    (classes, width), tokens = weight, prod(x[:-1])
    dx, dweight, _, *of_adapters = needs
    flops = 2 * tokens * classes * width * (1 + dx + dweight)
    for i, adapter in enumerate(spec.lora):
        da, db, _ = of_adapters[3 * i : 3 * i + 3]
        into, out = 2 * tokens * width * adapter.rank, 2 * tokens * classes * adapter.rank
        flops += into + out + (dx or da) * out + (dx + da) * into + db * (into + out)
    return flops


def loss_saved_bytes(
    spec: LossSpec, x: Shape, weight: Shape, needs: Sequence[bool], dtype: torch.dtype, weight_dtype: torch.dtype
) -> int:
    """Bytes that a call keeps for backward and that are not the caller's: gradients made in forward, the log-sum-exp of
    each token, 16 bytes of random state. x, of `dtype`, and the caller's own tensors do not count.
    """
    (classes, width), tokens = weight, prod(x[:-1])
    wide = accumulation_type(dtype).itemsize
    total = tokens * wide + 16 * spec.has_dropout
    if spec.keep == "inputs" or spec.reduction == "none":
        return total
    # A float16 weight's gradient, a sum over all tokens, is kept in float32.
    own = 4 if weight_dtype == torch.float16 else weight_dtype.itemsize
    dx, dweight, dbias, *of_adapters = needs
    total += dx * tokens * width * dtype.itemsize + dweight * classes * width * own + dbias * classes * wide
    for i, adapter in enumerate(spec.lora):
        sizes = (adapter.rank * width, classes * adapter.rank, classes)
        total += sum(need * size * wide for need, size in zip(of_adapters[3 * i : 3 * i + 3], sizes, strict=True))
    return total
