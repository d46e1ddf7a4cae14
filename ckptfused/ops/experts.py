"""The op of a mixture's experts: its call, its fake kernels and its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ckptfused import _extension  # noqa: F401  (registers the ops)
from ckptfused.checks import check_plain, compute_word, transformed
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.eager.experts import eager_experts
from ckptfused.ops.second_order import apart, batched_gradients, one_by_one
from ckptfused.spec.experts import ExpertsSpec, parse_experts

_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_library = torch.library.Library("ckptfused", "IMPL")


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    spec: ExpertsSpec,
) -> Tensor:
    """The output of a mixture of experts, y[n] = Σ_j weights[n, j] · expert[ids[n, j]](x[n]), whose backward is
    routing-exact: it reads the ids of its forward.

    The weight multiplies the hidden values in place of the down product's result, so that neither that product nor the
    sum over choices is replayed for the gradient of the weight. Hugging Face multiplies the result: in float64 the two
    differ by rounding alone; in half precision theirs rounds the result once before its product with the weight and
    once after, ours the weighted hidden values once (which makes the error no larger), the sum over a token's choices
    is in float32 in the order of the choices, and is rounded once. Rows are sorted by expert, stably; a sum's order
    depends on the ids alone, so the bits of a run are those of the next.

    **Shapes** x [N, C]; ids [N, k], integers in [0, E); weights [N, k]; up [E, 2I, C] (gate first; [E, I, C] without a
    gate), down [E, C, I], each with the last two swapped where `spec.transposed`; biases [E, 2I] and [E, C]. Result as
    x. float64, float32, bfloat16, float16; products in autocast's type.
    **Saves** x, the weights, and ids in one byte each (two for more than 256 experts).
    **Recomputes** the product that makes gate and up.
    **Raises** `IndexError` for an id that is no expert; `RuntimeError` for other shapes, and where one of its inputs
    was changed in place before backward.
    **Source** `transformers.integrations.moe.grouped_mm_experts_forward`.
    """
    for name, t in {"x": x, "ids": ids, "weights": weights, "up": up, "down": down}.items():
        check_plain(name, t)
    text = spec.to_string()
    if transformed():
        parsed = parse_experts(text + compute_word(x, residual=False))
        return eager_experts(x, ids, weights, up, up_bias, down, down_bias, parsed)
    return torch.ops.ckptfused.experts.default(x, ids, weights, up, up_bias, down, down_bias, text)


def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    text: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    slots = (x, weights, up, up_bias, down, down_bias)
    return [t.new_empty(t.shape) for t, need in zip(slots, needs, strict=True) if need and t is not None]


def _differentiable(
    op: Any,
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    text: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The Autograd kernel: the op itself, or, where a graph of the backward is made, plain PyTorch's gradients."""
    slots = (x, weights, up, up_bias, down, down_bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, *slots)):
        own: list[Any] = [t if t is None or not need else apart(t) for t, need in zip(slots, needs, strict=True)]
        x, weights, up, up_bias, down, down_bias = own
        y = eager_experts(x, ids, weights, up, up_bias, down, down_bias, parse_experts(text))
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    with below_autograd():
        return op(dy, x, ids, weights, up, up_bias, down, down_bias, text, needs)  # type: ignore[no-any-return]


def _products(rows: int, up: Any, down: Any) -> int:
    """FLOPs of one pass of so many rows through up and down. up, down: shapes."""
    return 2 * rows * (up[1] * up[2] + down[1] * down[2])


def _forward_flops(x: Any, ids: Any, weights: Any, up: Any, up_bias: Any, down: Any, *rest: Any, **_: Any) -> int:
    return _products(ids[0] * ids[1], up, down)


def _backward_flops(
    dy: Any, x: Any, ids: Any, weights: Any, up: Any, up_bias: Any, down: Any, *rest: Any, **_: Any
) -> int:
    needs, rows = rest[-1], ids[0] * ids[1]
    need_x, need_weights, need_up, need_up_bias, need_down, _need_down_bias = needs
    below = need_x or need_up or need_up_bias
    up_products = 1 + need_x + need_up
    down_products = need_down + (below or need_weights)
    return 2 * rows * (up_products * up[1] * up[2] + down_products * down[1] * down[2])


def _register() -> None:
    ops = torch.ops.ckptfused
    torch.library.register_fake("ckptfused::experts_fwd", _fake_forward)
    torch.library.register_fake("ckptfused::experts_bwd", _fake_backward)
    register_flop_formula(ops.experts_fwd)(_forward_flops)
    register_flop_formula(ops.experts_bwd)(_backward_flops)
    op = ops.experts_bwd.default
    for key in _KEYS:
        _library.impl("experts_bwd", partial(_differentiable, op), key)
    _library.impl("experts_bwd", partial(batched_gradients, op), "Batched")
    torch.library.register_vmap("ckptfused::experts_bwd", partial(one_by_one, op), lib=_library)


_register()
