"""The loss head: closed forms of what it multiplies and saves, and its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ckptfused.cost.ledger import Ledger
from ckptfused.cost.open_ledger import OpenLedger
from ckptfused.spec import LossSpec
from ckptfused.triton.problem import accumulation_type

Shape = Sequence[int]


def loss_flops(spec: LossSpec, x: Shape, weight: Shape, needs: Sequence[bool], *, backward: bool, kept: bool) -> int:
    """FLOPs of the products of one forward or backward, adapters included.

    x [..., C] and weight [V, C] are shapes, the latter of numbers or of codes. needs: whether the gradients of x,
    weight, bias and each adapter's a, b and bias are asked for of this call. kept: of a backward, whether forward made
    them, so that nothing is multiplied.
    """
    if backward and kept:
        return 0
    classes, width, tokens = spec.classes or weight[0], x[-1], prod(x[:-1])
    dx, dweight, _, *of_adapters = needs
    flops = 2 * tokens * classes * width * (1 + dx + dweight)
    for i, adapter in enumerate(spec.lora):
        da, db, _ = of_adapters[3 * i : 3 * i + 3]
        into, out = 2 * tokens * width * adapter.rank, 2 * tokens * classes * adapter.rank
        flops += into + out + (dx or da) * out + (dx + da) * into + db * (into + out)
    return flops


def loss_saved_bytes(
    spec: LossSpec,
    x: Shape,
    weight: Shape,
    needs: Sequence[bool],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    *,
    device: str | torch.device = "cpu",
) -> int:
    """Bytes that a call keeps for backward and that are not the caller's: gradients made in forward, the log-sum-exp of
    each token, 16 bytes of random state, and of a mean on a GPU, where no host reads it, the 8 of its divisor. x, of
    `dtype`, and the caller's own tensors do not count.
    """
    classes, width, tokens = spec.classes or weight[0], x[-1], prod(x[:-1])
    wide = accumulation_type(dtype).itemsize
    total = tokens * wide + 16 * spec.has_dropout
    if spec.reduction == "mean" and torch.device(device).type != "cpu":
        total += 8
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


def loss_ledgers(
    spec: LossSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    adapters: Sequence[Tensor | None] = (),
    *,
    device: str = "cpu",
    threads: int | None = None,
) -> tuple[Ledger, Ledger]:
    """Every allocation, product and launch of one `linear_cross_entropy` before it is divided, and of its backward.

    **Shapes** those of the call: x [..., C], weight [V, C], bias and class_weight [V]; adapters: a, b and bias of each,
    then what stands beside the codes of a weight in few bits.
    Their types and which of them require gradients count, not their values: meta tensors will do.

    The forward's ledger has its results in it and what it keeps for backward, the backward's all gradients (those that
    forward made are scaled where they are). `device`, `threads`, and what is not counted: as in `forward_ledger`.
    """
    meta = [None if t is None else _meta(t) for t in (x, weight, bias, class_weight, *adapters)]
    target = torch.empty(x.shape[:-1], dtype=torch.int64, device="meta")
    wanted = [t for t in meta if t is not None and t.requires_grad]
    with torch.enable_grad(), OpenLedger(device, threads) as forward:
        made = torch.ops.ckptfused.linear_cross_entropy(*meta[:2], meta[2], target, meta[3], meta[4:], spec.to_string())
    dloss = torch.empty_like(made[0])
    with OpenLedger(device, threads) as backward:
        held = torch.autograd.grad(made[0], wanted, dloss) if wanted else ()
    del held
    return forward.ledger, backward.ledger


def _meta(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
