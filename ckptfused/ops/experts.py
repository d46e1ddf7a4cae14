"""The op of a mixture's experts: its call, its fake kernels and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ckptfused import _extension, rng  # noqa: F401  (registers the ops)
from ckptfused.checks import check_plain, compute_word, transformed
from ckptfused.compat.torch_compile import constant_result
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.eager.dropout import random_mask
from ckptfused.eager.experts import eager_experts
from ckptfused.ops import enclosing_checkpoint
from ckptfused.ops.fake import or_counted
from ckptfused.ops.second_order import asks_for_a_graph, plain_gradients, register_derivative
from ckptfused.spec.experts import ExpertsSpec, parse_experts


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapters: Sequence[Tensor | None] = (),
    stored: Sequence[Tensor | None] = (),
    *,
    spec: ExpertsSpec | str,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The output of a mixture of experts, y[n] = Σ_j weights[n, j] · expert[ids[n, j]](x[n]), whose backward is
    routing-exact: it reads the ids of its forward. spec: what they compute, or its text form.

    The weight multiplies the hidden values in place of the down product's result, so that neither that product nor the
    sum over choices is replayed for the gradient of the weight. Hugging Face multiplies the result: in float64 the two
    differ by rounding alone; in half precision theirs rounds the result once before its product with the weight and
    once after, ours the weighted hidden values once (which makes the error no larger), the sum over a token's choices
    is in float32 in the order of the choices, and is rounded once. Rows are sorted by expert, stably, and go through in
    parts of at most half as many again as an expert would have were all alike, so that no router makes a call take more
    memory; a sum's order depends on the ids alone, so the bits of a run are those of the next.

    LoRA adds x·Aᵀ·Bᵀ by `spec.up_scale` to the first product of each expert's rows, by `spec.down_scale` to the last:
    no weight is merged, and none has a gradient for an adapter's sake. In half precision x·Aᵀ is rounded. Dropout on
    what adapters are given (`spec.up_p`, `spec.down_p`) decides for each choice of each token by itself; its state is
    one draw of `generator` (None: PyTorch's default), which is saved, and its masks are made again in backward.

    On a GPU experts in bfloat16 go through PyTorch's grouped products, of up to 8,192 rows at once: all sizes (ranks of
    adapters, too) a multiple of 8, four experts or more, biases frozen. There what an adapter adds is rounded before.

    Frozen weights that bitsandbytes stores in 4 bits (`spec.quant`) are numbers one expert at a
    time (on a GPU a few), in the type of the products: once in a call, and once in its backward.

    **Shapes** x [N, C]; ids [N, k], integers in [0, E); weights [N, k]; up [E, 2I, C] (gate first; [E, I, C] without a
    gate), down [E, C, I], each with the last two swapped where `spec.transposed`; biases [E, 2I] and [E, C];
    adapters none or up_a [E, r, C], up_b [E, 2I, r], down_a [E, r, I] and down_b [E, C, r], of which those of a product
    may be None. Of weights in 4 bits codes uint8 [E, bytes], and `stored`: scale, offset, nested_scale and table of up,
    and then of down, None where there is none (`spec.Quantized`). Result as x. float64, float32, bfloat16, float16;
    products in autocast's type.
    **Saves** x, the weights, ids in one byte each (two for more than 256 experts), and of dropout 16 bytes.
    **Recomputes** the product that makes gate and up, and x·Aᵀ of adapters, with the same masks.
    **Raises** `IndexError` for an id that is no expert; `RuntimeError` for other shapes, and where one of its inputs
    was changed in place before backward.
    **Source** `transformers.integrations.moe.grouped_mm_experts_forward`.
    """
    for name, t in {"x": x, "ids": ids, "weights": weights, "up": up, "down": down}.items():
        check_plain(name, t)
    text = spec if isinstance(spec, str) else spec.to_string()
    if transformed():
        parsed = parse_experts(text + compute_word(x, residual=False))
        masks = _masks(ids, adapters, parsed, lambda shape, p, _: random_mask(shape, p, x.device, generator))
        return eager_experts(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, parsed, masks)
    state = rng.state(x, enclosing_checkpoint.source(x, generator)) if _draws(text) else None
    op = torch.ops.ckptfused.experts.default
    return op(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, state, text)  # type: ignore[no-any-return]


@constant_result
def _draws(text: str) -> bool:
    """Whether a call draws random numbers: to a compiler a constant."""
    return parse_experts(text).has_dropout


def _masks(
    ids: Tensor,
    adapters: Sequence[Tensor | None],
    spec: ExpertsSpec,
    mask: Callable[[tuple[int, int], float, int], Tensor],
) -> list[Tensor | None]:
    """The masks of the adapters' dropout, as plain PyTorch takes them. mask: makes one of its shape, p and site."""
    up_a, _, down_a, _ = adapters or (None,) * 4
    return [
        None if a is None or p == 0 else mask((ids.numel(), a.size(-1)), p, site)
        for site, (a, p) in enumerate(((up_a, spec.up_p), (down_a, spec.down_p)), rng.FFN_RESIDUAL + 1)
    ]


def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _slots(call: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors among a backward op's arguments that have a gradient, in its order."""
    x, _ids, weights, up, up_bias, down, down_bias, adapters, *_ = call
    return x, weights, up, up_bias, down, down_bias, *(adapters or (None,) * 4)


def _fake_backward(dy: Tensor, *call: Any) -> list[Tensor]:
    needs = call[-1]
    return [t.new_empty(t.shape) for t, need in zip(_slots(call), needs, strict=True) if need and t is not None]


def _differentiable(op: Any, dy: Tensor, *call: Any) -> list[Tensor]:
    """The Autograd kernel: the op itself, or, where a graph of the backward is made, plain PyTorch's gradients."""
    ids, stored, state, text, needs = call[1], *call[-4:]
    if asks_for_a_graph(dy, *_slots(call)):
        spec = parse_experts(text)
        masks = _masks(ids, call[7], spec, lambda shape, p, site: rng.dropout_mask(shape, p, state, site))
        plain: Any = eager_experts
        return plain_gradients(
            lambda x, *rest: plain(x, ids, *rest[:5], rest[5:], stored, spec, masks), dy, _slots(call), needs
        )
    with below_autograd():
        return op(dy, *call)  # type: ignore[no-any-return]


def _forward_flops(
    x: Any, ids: Any, weights: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, adapters: Any, *_: Any, **__: Any
) -> int:
    return 2 * ids[0] * ids[1] * sum(map(_entries, (up, down, *adapters)))


def _entries(shape: Any) -> int:
    """How many entries one expert's part of a stack has: two codes a byte where it is stored in 4 bits."""
    if shape is None:
        return 0
    return int(2 * shape[1] if len(shape) == 2 else shape[1] * shape[2])


def _backward_flops(
    dy: Any, x: Any, ids: Any, weights: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, adapters: Any,
    stored: Any, rng_state: Any, text: str, needs: Any, **_: Any,
) -> int:  # fmt: skip
    rows = ids[0] * ids[1]
    up_a, up_b, down_a, down_b = (shape and _entries(shape) for shape in adapters or (None,) * 4)
    need_x, need_weights, need_up, need_up_bias, need_down, _, need_up_a, need_up_b, need_down_a, need_down_b = needs
    below = need_x or need_up or need_up_bias or need_up_a or need_up_b
    through = below or need_weights
    count = (1 + need_x + need_up) * _entries(up) + (need_down + through) * _entries(down)
    for a, b, need_a, need_b, needed, replayed in (
        (up_a, up_b, need_up_a, need_up_b, need_x, True),
        (down_a, down_b, need_down_a, need_down_b, through, False),
    ):
        if a is not None and b is not None:
            count += (replayed + need_b) * a + replayed * b + need_b * b  # in Aᵀ, and Bᵀ or B's gradient
            count += (needed or need_a) * b + need_a * a + needed * a
    return 2 * rows * count  # type: ignore[no-any-return]


_forward, _backward = torch.ops.ckptfused.experts_fwd, torch.ops.ckptfused.experts_bwd
torch.library.register_fake("ckptfused::experts_fwd", or_counted(_fake_forward, _forward.default))
torch.library.register_fake("ckptfused::experts_bwd", or_counted(_fake_backward, _backward.default))
register_flop_formula(_forward)(_forward_flops)
register_flop_formula(_backward)(_backward_flops)
register_derivative("experts_bwd", _differentiable)
