"""The loss head in plain PyTorch: logits as a whole, their cross-entropy with all its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.checks import computing_in
from ckptfused.eager.dequantize import dequantize
from ckptfused.spec import LossSpec


class EagerLoss(NamedTuple):
    """The result of the op `linear_cross_entropy`: the loss, then [N] each token's."""

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    predicted: Tensor


def eager_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Tensor | None], spec: LossSpec,
    masks: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The logits after scale and soft-cap, in float32 (float64 for float64 x).

    **Shapes** x [..., C], weight [V, C], bias [V]; adapters: a [r, C], b [V, r], bias [V] of each, in a row; where the
    weight is codes, then what stands beside these. masks: for each adapter what its input is multiplied by; None:
    PyTorch's dropout draws.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = x.dtype if spec.compute is None else getattr(torch, spec.compute)
    if spec.quant:
        state = adapters[3 * len(spec.lora) :]
        weight = dequantize(weight, state, spec.quant[0].form, (spec.classes, x.size(-1)), product)
    logits = F.linear(*(t if t is None else t.to(product) for t in (x, weight, bias))).to(wide)  # type: ignore[arg-type]
    for i, adapter in enumerate(spec.lora):
        a, b, own = (t if t is None else t.to(wide) for t in adapters[3 * i : 3 * i + 3])
        assert a is not None and b is not None
        dropped = F.dropout(x, adapter.p) if masks is None else x * masks[i]
        logits = logits + adapter.scale * F.linear(F.linear(dropped.to(wide), a), b, own)
    logits = logits * spec.logit_scale
    return spec.softcap * torch.tanh(logits / spec.softcap) if spec.softcap else logits


def eager_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    adapters: Sequence[Tensor | None],
    spec: LossSpec,
    masks: Sequence[Tensor] | None = None,
) -> EagerLoss:
    """What `linear_cross_entropy` computes: the product in the spec's type, whatever autocast is on, the rest wide.

    **Source** `torch.nn.functional.cross_entropy` and, for z-loss, Chowdhery et al. 2022 (PaLM), section 5.
    """
    with computing_in(x):
        logits = eager_logits(x, weight, bias, adapters, spec, masks)
        logits = logits.view(target.numel(), logits.size(-1))
        options = {"ignore_index": spec.ignore_index, "label_smoothing": spec.label_smoothing, "reduction": "none"}
        targets = target.flatten()
        share = None if class_weight is None else class_weight.to(logits.dtype)
        token_loss = F.cross_entropy(logits, targets, share, **options)  # type: ignore[arg-type]
        lse = logits.logsumexp(-1)
        if spec.z_loss:
            token_loss = token_loss + spec.z_loss * lse.square().masked_fill(targets == spec.ignore_index, 0)
        token_loss, lse, predicted = (t.view(target.shape) for t in (token_loss, lse, logits.argmax(-1)))
        return EagerLoss(token_loss if spec.reduction == "none" else token_loss.sum(), token_loss, lse, predicted)
