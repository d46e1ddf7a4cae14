"""The rule for what is between attention and the last projection: layout, and an output gate, of entries or heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.models.derive.recording.recorder import RefusedError, Value
from ckptfused.models.derive.rules.core import Core
from ckptfused.models.derive.rules.heads import side
from ckptfused.models.derive.rules.layouts import by_rows
from ckptfused.models.derive.rules.pieces import Linear, layout_only, linear
from ckptfused.models.derive.rules.products import PRODUCTS, merged
from ckptfused.models.derive.rules.sinks import sinks_after
from ckptfused.models.derive.walk import Walk

_MULTIPLIES = ("mul", "rmul", "multiply")


class Attended(NamedTuple):
    """Attention before the last projection of its half, and the gate between them."""

    end: Value
    """What attention itself made."""
    factor: Value | None = None
    """The sigmoid that multiplies it, arranged as it is there; None without a gate."""
    gated: Value | None = None
    """The product of the two."""


class OutputGate(NamedTuple):
    """The projection whose sigmoid multiplies attention's result."""

    kind: str
    """What it multiplies, as `spec.OUTPUT_GATES`."""
    made: Linear
    in_q: bool
    """Whether it is in q's projection: rows [H, 2, D], q of each head first."""


def attended(walk: Walk, inner: Value) -> Attended | None:
    """The attention that a projection takes; None where it takes something else."""
    base = _base(walk, inner)
    if _attends(walk, base):
        return Attended(base)
    call = base.call
    if call is not None and call.op in _MULTIPLIES and len(call.inputs) == 2:
        for result, factor in (call.inputs, call.inputs[::-1]):
            if _base(walk, factor).op == "sigmoid" and _attends(walk, end := _base(walk, result)):
                return Attended(end, factor, base)
    return None


def _base(walk: Walk, v: Value) -> Value:
    """The value before what only arranges it, of which nothing is taken yet."""
    return walk.glance(walk.through, v) or v


def _attends(walk: Walk, v: Value) -> bool:
    """Whether a value is attention's result itself."""
    if v.op in ("scaled_dot_product_attention", *PRODUCTS):
        return walk.glance(linear, walk, v) is None
    return walk.glance(sinks_after, walk, v) is not None


def output_gate(walk: Walk, inner: Value, at: Attended, found: Core) -> OutputGate | None:
    """The gate between attention and the last projection, which takes `inner`; None without one. **Raises**
    `RefusedError` where there is more between them.
    """
    o = found.ends[3]
    if at.gated is None or at.factor is None:
        _only_layout(walk, inner, at.end)
        if not merged(inner.data, o):
            raise RefusedError("heads come together in another order than the block's", inner.call)
        return None
    call = at.gated.call
    assert call is not None
    _only_layout(walk, inner, at.gated)
    _only_layout(walk, next(v for v in call.inputs if v is not at.factor), at.end)
    walk.take(call, "output gate")
    sigmoid = walk.through(at.factor).call
    assert sigmoid is not None
    walk.take(sigmoid, "output gate")
    made = side(walk, sigmoid.inputs[0], "the output gate")
    if made.norm is not None or made.tables:
        raise RefusedError("the output gate has a norm or a rotation", sigmoid)
    for kind, gate, in_q in _ways(made.made.y.data, o):
        if merged(inner.data, o * torch.sigmoid(gate).transpose(1, 2)):
            return OutputGate(kind, made.made, in_q)
    raise RefusedError("a gate neither of each entry nor of each head", sigmoid)


def _only_layout(walk: Walk, v: Value, end: Value) -> None:
    if not layout_only(walk, v, end):
        raise RefusedError(f"no rule takes {v}", v.call)


def _ways(y: Tensor, o: Tensor) -> Iterator[tuple[str, Tensor, bool]]:
    """Every way in which a product may be the gate of o [B, H, T, D]: its kind, its numbers [B, T, H, D or 1], and
    whether they are behind those of q."""
    batch, heads, tokens, width = o.shape
    for rows in dict.fromkeys(((batch, tokens), (tokens, batch))):
        if (given := by_rows(y, rows)) is None:
            continue
        made = given if rows == (batch, tokens) else given.transpose(0, 1)
        if made.shape[-1] == heads * width:
            yield "entry", made.unflatten(-1, (heads, width)), False
        if made.shape[-1] == heads:
            yield "head", made.unsqueeze(-1), False
        if made.shape[-1] == 2 * heads * width:
            yield "entry", made.unflatten(-1, (heads, 2, width))[..., 1, :], True
