"""Rules for attention itself: its core in either spelling."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptfused.models.derive.recording.names import words_of
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.core import Core
from ckptfused.models.derive.rules.masks import constant, mask_steps, take_all, with_mask
from ckptfused.models.derive.rules.products import PRODUCTS, by_heads, head_product, softmax_last
from ckptfused.models.derive.rules.sinks import sinks_after, with_sinks_after, without_sinks
from ckptfused.models.derive.walk import Walk, arranges, close, ratio

_LOGITS = frozenset(("mul", "rmul", "div", "truediv", "tanh"))
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_AFTER_SOFTMAX = words_of("to type_as float double type half bfloat16 dropout clone contiguous")


def core(walk: Walk, y: Value) -> Core:
    """The attention that made a value [B, H, T, D]. **Raises** `RefusedError` where none did."""
    call = y.call
    if call is not None and call.op == "scaled_dot_product_attention":
        return _sdpa(walk, y, call)
    if call is not None and call.op in PRODUCTS:
        return _written_out(walk, y, call)
    scaled = sinks_after(walk, y)
    inner = scaled.attended
    if inner.call is None or inner.op not in PRODUCTS:
        raise RefusedError("not attention", call)
    return with_sinks_after(walk, _written_out(walk, inner, inner.call), scaled, y)


def _sdpa(walk: Walk, y: Value, call: Recorded) -> Core:
    q, k, v = (call.given(i, name) for i, name in enumerate(("query", "key", "value")))
    ends = tuple(by_heads(one.data, walk.batch) for one in (q, k, v, y))
    if any(t is None for t in ends):
        raise RefusedError("attention of tensors with other than three or four dimensions", call)
    walk.take(call, "attention")
    given, scale = call.given(3, "attn_mask"), call.kwargs.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    found = Core(q, k, v, y, ends, scale, causal=bool(call.given(5, "is_causal", False)))  # type: ignore[arg-type]
    if given is not None:
        kind = "keep" if given.data.dtype == torch.bool else "add"
        found = with_mask(walk, found, given, kind)
    return found._replace(dropout=call if call.mask is not None else None)


def _written_out(walk: Walk, y: Value, call: Recorded) -> Core:
    walk.take(call, "attention")
    operands = [v for v in call.inputs if _is_softmax(walk, v)]
    if len(operands) != 1:
        raise RefusedError(f"no rule takes {call}", call)
    last = head_product(call, walk.batch, operands[0])
    probs, v = walk.through(last.left), last.right
    if last.added is not None or last.factor != 1 or last.left is not operands[0]:
        raise RefusedError(f"no rule takes {call}", call)
    dropped, weights = None, [probs]
    if probs.call is not None and probs.op == "dropout" and probs.call.mask is not None:
        dropped = probs.call
        walk.take(dropped, "attention")
        probs = walk.through(probs.call.inputs[0])
        weights.append(probs)
    soft = probs.call
    assert soft is not None
    walk.take(soft, "attention")
    arranged = by_heads(probs.data, walk.batch)
    if not softmax_last(soft, probs.data.dim()) or arranged is None:
        raise RefusedError(f"no rule takes {probs}", soft)
    logits, sinks = _shifted(walk, walk.same(soft.inputs[0])), ""
    if (keys := last.ends[1].shape[-2]) != arranged.shape[-1]:
        logits, sinks = without_sinks(walk, logits)
        arranged = arranged[..., :keys]
    if dropped is None and not close(last.ends[0] @ last.ends[1], arranged @ last.ends[1]):
        raise RefusedError("attention over another dimension than the last", soft)
    found = Core(v, v, v, y, (last.ends[2],) * 4, 1.0, dropout=dropped, weights=tuple(weights), sinks=sinks)
    chain: list[Recorded] = []
    while True:
        if not chain:
            logits, found = mask_steps(walk, logits, found)
            raw = logits
        if (before := _one_given(walk, raw)) is None or not (raw.op in _LOGITS or arranges(raw)):
            break
        walk.take(raw.call, "attention" if raw.op in _LOGITS else "layout")
        chain += [raw.call] if raw.call is not None and raw.op in _LOGITS else []
        raw = walk.same(before)
        logits = logits if chain else raw
    if raw.call is None or raw.op not in PRODUCTS:
        raise RefusedError(f"no rule takes {raw}", raw.call)
    walk.take(raw.call, "attention")
    first = head_product(raw.call, walk.batch, _left_of(raw.call))
    if not first.in_order:
        raise RefusedError("the logits are not [B, H, T, T]", raw.call)
    scale, cap = first.factor, 0.0
    if first.added is not None and first.added.op in _ZEROS:
        take_all(walk, first.added)
    elif first.added is not None:
        if chain:
            raise RefusedError("logits that are scaled after a mask", raw.call)
        found = with_mask(walk, found, first.added, "add")
    else:
        by, cap = _scaled(walk, first.ends[2] * first.factor, logits, chain)
        scale *= by
        if raw.op == "baddbmm":
            take_all(walk, raw.call.inputs[0])
    k = first.ends[1].transpose(-1, -2)
    ends = (first.ends[0], k, last.ends[1], last.ends[2])
    return found._replace(q=first.left, k=first.right, ends=ends, scale=scale, softcap=cap)


def _one_given(walk: Walk, v: Value) -> Value | None:
    """What a value is made of, but for numbers, of which there may be tensors; None where that is none or several."""
    operands = [] if v.call is None else v.call.inputs
    given = operands if len(operands) < 2 else [one for one in operands if constant(walk, one) is None]
    return given[0] if len(given) == 1 else None


def _is_softmax(walk: Walk, v: Value) -> bool:
    """Whether a value is made by a softmax, casts and dropout aside."""
    while v.call is not None and (v.op in _AFTER_SOFTMAX or arranges(v)):
        v = v.call.inputs[0]
    return v.op == "softmax"


def _left_of(call: Recorded) -> Value | None:
    """The operand of a product whose rows are those of the result, where the call does not say."""
    return call.inputs[0] if call.op == "einsum" else None


def _shifted(walk: Walk, logits: Value) -> Value:
    """Logits before their largest was taken off, which changes no probability."""
    call = logits.call
    if call is None or call.op != "sub" or len(call.inputs) != 2:
        return logits
    before, most = call.inputs
    taken = [call]
    while most.call is not None and most.op in ("detach", "getitem") and most is not before:
        taken.append(most.call)
        most = most.call.inputs[0]
    if most.call is None or most.op not in ("amax", "max") or most.call.inputs[0] is not before:
        return logits
    if most.call.given(1, "dim") not in (-1, before.data.dim() - 1) or not most.call.given(2, "keepdim", False):
        return logits
    for one in (*taken, most.call):
        walk.take(one, "attention")
    return walk.same(before)


def _scaled(walk: Walk, raw: Tensor, logits: Value, chain: list[Recorded]) -> tuple[float, float]:
    """Scale and soft-cap by which logits were made of products."""
    if not chain:
        return 1.0, 0.0
    made = by_heads(logits.data, walk.batch)
    assert made is not None
    capped = next((call.inputs[0] for call in chain if call.op == "tanh"), None)
    before = made if capped is None else by_heads(capped.data, walk.batch)
    scale = None if before is None else ratio(raw, before)
    if scale is not None and capped is None:
        return scale, 0.0
    for cap in {abs(float(n)) for call in chain for n in call.numbers if isinstance(n, int | float) and n}:
        if scale is not None and close(cap * torch.tanh(raw * scale), made):
            return scale * cap, cap
    raise RefusedError("logits that no scale and soft-cap make", chain[0])
