"""The derivative of the loss's backward op: through plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ckptfused import _extension, rng  # noqa: F401  (the first registers the ops)
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.eager.loss import eager_linear_cross_entropy
from ckptfused.ops.second_order import asks_for_a_graph, plain_gradients, register_derivative
from ckptfused.spec import FIRST_SITE, LossSpec, parse_loss


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
    if asks_for_a_graph(dloss, *variables):
        spec = parse_loss(text)

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None, *adapters: Tensor | None) -> Tensor:
            masks = adapter_dropout(x, spec, state)
            return eager_linear_cross_entropy(x, weight, bias, target, class_weight, adapters, spec, masks).loss

        return plain_gradients(plain, dloss, variables, needs)
    with below_autograd():
        return op(dloss, x, weight, bias, target, class_weight, adapters, lse, kept, state, text, needs)  # type: ignore[no-any-return]


register_derivative("linear_cross_entropy_bwd", _differentiable)
