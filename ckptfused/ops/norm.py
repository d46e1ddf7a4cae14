"""A norm by itself, whose backward rebuilds everything from its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptfused import _extension  # noqa: F401  (registers the ops)
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.eager.norm import norm as eager_norm
from ckptfused.ops.second_order import asks_for_a_graph, plain_gradients, register_derivative


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """A norm over the last dimension.

    **Shapes** x [..., C]; weight, bias [C] or None, of any floating dtype. Result: as x, float32 inside for the 16-bit
    types and rounded once.
    **Saves** x.
    **Recomputes** each row's statistics.
    **Source** `ckptfused.eager.norm.norm`.
    """
    return torch.ops.ckptfused.norm.default(x, weight, bias, kind, eps)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.kind, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    found = iter(torch.ops.ckptfused.norm_grads.default(dy, *ctx.saved_tensors, ctx.kind, ctx.eps, needs))
    return (*(next(found) if need else None for need in needs), None, None)


def _differentiable(op: Any, dy: Tensor, *call: Any) -> list[Tensor]:
    """The Autograd kernel: the op itself, or, where a graph of the backward is made, plain PyTorch's gradients."""
    x, weight, bias, kind, eps, needs = call
    if asks_for_a_graph(dy, x, weight, bias):

        def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return eager_norm(x, weight, bias, kind, eps)

        return plain_gradients(plain, dy, (x, weight, bias), needs)
    with below_autograd():
        return op(dy, *call)  # type: ignore[no-any-return]


torch.library.register_autograd("ckptfused::norm", _backward, setup_context=_save)
register_derivative("norm_grads", _differentiable)
