"""Rules for attention sinks, a logit of each head beside those of the keys: within the softmax, or after it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ckptfused.models.derive.recording.recorder import RefusedError, Value
from ckptfused.models.derive.rules.core import Core
from ckptfused.models.derive.rules.products import PRODUCTS, by_heads
from ckptfused.models.derive.walk import Walk, close

_JOINS = ("cat", "concat", "concatenate")


def without_sinks(walk: Walk, logits: Value) -> tuple[Value, str]:
    """The logits of keys among those of one more column, and the name of the sinks that are this column."""
    call = logits.call
    if call is None or call.op not in _JOINS or len(call.inputs) != 2:
        raise RefusedError("a softmax over another number of logits than there are values", call)
    keys, beside = call.inputs
    if call.given(1, "dim", 0) not in (-1, logits.data.dim() - 1) or beside.shape[-1] != 1:
        raise RefusedError(f"no rule takes {call}", call)
    heads = by_heads(beside.data, walk.batch)
    if heads is None or keys.shape[-1] != logits.shape[-1] - 1:
        raise RefusedError(f"no rule takes {call}", call)
    walk.take(call, "attention")
    return walk.same(keys), _name(walk, beside, heads[0, :, 0, 0])


class SinksAfter(NamedTuple):
    """Attention that is scaled by sigmoid(lse - sinks), as a softmax over the sinks as well makes it."""

    attended: Value
    """What is scaled."""
    lse: Value
    name: str


def sinks_after(walk: Walk, y: Value) -> SinksAfter:
    """The attention that is scaled for its sinks. **Raises** `RefusedError` where a value is no such thing."""
    if y.call is None or y.op not in ("mul", "rmul", "multiply") or len(y.call.inputs) != 2:
        raise RefusedError("not attention", y.call)
    attended, factor = y.call.inputs if walk.same(y.call.inputs[0]).op in PRODUCTS else y.call.inputs[::-1]
    gate = walk.through(factor)
    inner = walk.same(gate.call.inputs[0]) if gate.call is not None and gate.op == "sigmoid" else gate
    if inner is gate or inner.call is None or inner.op != "sub" or len(inner.call.inputs) != 2 or inner.call.kwargs:
        raise RefusedError("not attention", y.call)
    lse, sinks = inner.call.inputs
    lse = walk.same(lse)
    if lse.op != "logsumexp" or lse.data.dim() != 3 or sinks.data.dim() > 3:
        raise RefusedError("not attention", y.call)
    for call in (y.call, gate.call, inner.call, lse.call):
        walk.take(call, "attention")
    return SinksAfter(walk.same(attended), lse, _name(walk, sinks, sinks.data.expand_as(lse.data)[0, :, 0]))


def with_sinks_after(walk: Walk, found: Core, scaled: SinksAfter, y: Value) -> Core:
    """The attention whose result y is. **Raises** `RefusedError` where the log-sum-exp is of other logits."""
    soft, lse, ends = found.weights[-1].call, scaled.lse.call, by_heads(y.data, walk.batch)
    assert soft is not None and lse is not None
    logits = walk.same(lse.inputs[0])
    last = lse.given(1, "dim") in (-1, logits.data.dim() - 1)
    if found.sinks or not last or ends is None or walk.same(soft.inputs[0]) is not logits:
        raise RefusedError("attention is scaled by the log-sum-exp of other logits", lse)
    return found._replace(y=y, ends=(*found.ends[:3], ends), sinks=scaled.name)


def _name(walk: Walk, v: Value, heads: Tensor) -> str:
    """The name of the parameter that a value arranges, a number for each head. heads: these numbers."""
    name = walk.parameter(root := walk.through(v))
    if not name or not close(heads, root.data):
        raise RefusedError("sinks that are no parameter of a number for each head", v.call)
    return name
