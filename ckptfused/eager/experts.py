"""The experts of a mixture in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ckptfused.checks import computing_in
from ckptfused.eager.activation import activation
from ckptfused.eager.dequantize import dequantize
from ckptfused.eager.dropout import dropout
from ckptfused.spec import QUANT_SLOTS
from ckptfused.spec.experts import CLAMPED, ExpertsSpec


def eager_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    adapters: Sequence[Tensor | None],
    stored: Sequence[Tensor | None],
    spec: ExpertsSpec,
    keep: Sequence[Tensor | None] = (None, None),
) -> Tensor:
    """What the op `experts` computes, whatever autocast is on, differentiable any number of times.

    **Shapes** as the op's: x [N, C], ids and weights [N, k], up [E, 2I, C], down [E, C, I], biases [E, 2I] and [E, C],
    adapters none or up_a, up_b, down_a and down_b, [E, r, in] and [E, out, r]; stored none or, of up and of down, what
    is beside codes [E, bytes]; keep the masks of the adapters' dropout, bool [N·k, C] and [N·k, I], whose rows are the
    choices sorted by expert.
    """
    product = x.dtype if spec.compute is None else getattr(torch, spec.compute)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    beside, other = len(QUANT_SLOTS), not spec.transposed
    up = _numbers(up, stored[:beside], spec.form("up"), x.size(-1), product, others_first=other)
    down = _numbers(down, stored[beside:], spec.form("down"), x.size(-1), product, others_first=not other)
    up_a, up_b, down_a, down_b = adapters or (None,) * 4
    with computing_in(x):
        y = torch.zeros(x.shape, dtype=wide, device=x.device)
        end = 0
        for expert in range(up.size(0)):
            token, choice = torch.where(ids == expert)
            rows = slice(end, end := end + token.numel())
            if expert > 0 and token.numel() == 0:  # the first gives a result without tokens its graph
                continue
            score = weights[token, choice, None].to(wide)
            hidden = _linear(x[token].to(product), up[expert].to(product), spec)
            if up_bias is not None:
                hidden = hidden + up_bias[expert].to(product)
            if up_a is not None and up_b is not None:
                kept = _dropped(x[token].to(product), keep[0], rows, spec.up_p)
                hidden = hidden + _adapted(kept, up_a[expert], up_b[expert], spec.up_scale)
            h = (experts_activation(hidden, spec).to(wide) * score).to(product)
            out = _linear(h, down[expert].to(product), spec).to(wide)
            if down_a is not None and down_b is not None:
                kept = _dropped(h, keep[1], rows, spec.down_p)
                out = out + _adapted(kept, down_a[expert], down_b[expert], spec.down_scale)
            if down_bias is not None:
                out = out + score * down_bias[expert].to(wide)
            y = y.index_add(0, token, out)
        return y.to(x.dtype)


@torch.no_grad()
def _numbers(
    stack: Tensor, state: Sequence[Tensor | None], form: str | None, width: int, dtype: torch.dtype, others_first: bool
) -> Tensor:
    """A stack of weights; of codes [E, bytes] their numbers, of the sizes `width` and what remains, first or last."""
    if form is None:
        return stack
    count, size = stack.shape
    other = 2 * size // width
    return dequantize(stack, state, form, (count, other, width) if others_first else (count, width, other), dtype)


def _linear(x: Tensor, weight: Tensor, spec: ExpertsSpec) -> Tensor:
    return x @ (weight if spec.transposed else weight.t())


def _dropped(x: Tensor, keep: Tensor | None, rows: slice, p: float) -> Tensor:
    return dropout(x, None if keep is None else keep[rows], p)


def _adapted(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (x @ a.to(x.dtype).t() * scale) @ b.to(x.dtype).t()


def experts_activation(hidden: Tensor, spec: ExpertsSpec) -> Tensor:
    """The hidden values of what the first product makes. **Shapes** [..., 2I] to [..., I]; without a gate [..., I]."""
    if not spec.gated:
        return activation(None, hidden, spec.act)
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if spec.interleaved else hidden.chunk(2, -1)
    if spec.act != CLAMPED:
        return activation(gate, up, spec.act)
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return (up + spec.offset) * (gate * torch.sigmoid(gate * spec.alpha))
