"""The derivative of the loss's backward op: through plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptfused import _extension, rng  # noqa: F401  (the first registers the ops)
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.eager.loss import eager_linear_cross_entropy
from ckptfused.ops.second_order import apart, batched_gradients, one_by_one
from ckptfused.spec import FIRST_SITE, LossSpec, parse_loss

_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_library = torch.library.Library("ckptfused", "IMPL")


def adapter_dropout(x: Tensor, spec: LossSpec, state: Tensor | None) -> list[Tensor]:
    """What each adapter's dropout multiplies its input by, in a call with this random state."""
    masks = []
    for site, adapter in enumerate(spec.lora, FIRST_SITE):
        if state is None or adapter.p == 0:
            masks.append(x.new_ones(()))
            continue
        masks.append(rng.dropout_mask(x.shape, adapter.p, state, site) * rng.keep_scale(adapter.p))
    return masks


def _differentiable(
    op: Any,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    adapters: Sequence[Tensor | None],
    lse: Tensor,
    kept: Sequence[Tensor],
    state: Tensor | None,
    text: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The Autograd kernel: the op itself, or, where a graph of the backward is made, plain PyTorch's gradients."""
    variables = (x, weight, bias, *adapters)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dloss, *variables)):
        spec = parse_loss(text)
        own: list[Any] = [t if t is None or not need else apart(t) for t, need in zip(variables, needs, strict=True)]
        x, weight, bias, *adapters = own
        masks = adapter_dropout(x, spec, state)
        loss = eager_linear_cross_entropy(x, weight, bias, target, class_weight, adapters, spec, masks).loss
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        return list(torch.autograd.grad(loss, wanted, dloss, create_graph=True))
    with below_autograd():
        return op(dloss, x, weight, bias, target, class_weight, adapters, lse, kept, state, text, needs)


def _register() -> None:
    op = torch.ops.ckptfused.linear_cross_entropy_bwd.default
    for key in _KEYS:
        _library.impl("linear_cross_entropy_bwd", partial(_differentiable, op), key)
    _library.impl("linear_cross_entropy_bwd", partial(batched_gradients, op), "Batched")
    torch.library.register_vmap("ckptfused::linear_cross_entropy_bwd", partial(one_by_one, op), lib=_library)


_register()
