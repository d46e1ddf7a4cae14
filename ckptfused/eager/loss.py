"""The loss head in plain PyTorch: logits as a whole, their cross-entropy with all its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.spec import LossSpec


class EagerLoss(NamedTuple):
    """As the op `linear_cross_entropy` returns it: the loss, then [N] each token's."""

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    predicted: Tensor


def eager_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Tensor | None], spec: LossSpec,
    masks: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The logits after scale and soft-cap.

    **Shapes** x [..., C], weight [V, C], bias [V]; adapters: a [r, C], b [V, r], bias [V] of each, in a row. masks: for
    each adapter what its input is multiplied by; None: PyTorch's dropout draws.
    """
    logits = F.linear(x, weight, bias)
    for i, adapter in enumerate(spec.lora):
        a, b, own = adapters[3 * i : 3 * i + 3]
        assert a is not None and b is not None
        dropped = F.dropout(x, adapter.p) if masks is None else x * masks[i]
        logits = logits + adapter.scale * F.linear(F.linear(dropped, a), b, own)
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
    """What `linear_cross_entropy` computes, in the types of its arguments.

    **Source** `torch.nn.functional.cross_entropy` and, for z-loss, Chowdhery et al. 2022 (PaLM), section 5.
    """
    logits = eager_logits(x, weight, bias, adapters, spec, masks).flatten(0, -2)
    options = {"ignore_index": spec.ignore_index, "label_smoothing": spec.label_smoothing, "reduction": "none"}
    targets = target.flatten()
    token_loss = F.cross_entropy(logits, targets, class_weight, **options)  # type: ignore[arg-type]
    lse = logits.logsumexp(-1)
    if spec.z_loss:
        token_loss = token_loss + spec.z_loss * lse.square().masked_fill(targets == spec.ignore_index, 0)
    token_loss, lse, predicted = (t.view(target.shape) for t in (token_loss, lse, logits.argmax(-1)))
    return EagerLoss(token_loss if spec.reduction == "none" else token_loss.sum(), token_loss, lse, predicted)
