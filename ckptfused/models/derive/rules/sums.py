"""Sums of the residual stream: what they are of, and numbers by which they and their terms are multiplied."""

from __future__ import annotations

from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.pieces import norm
from ckptfused.models.derive.walk import Walk, ratio

FACTORS = ("mul", "rmul", "div", "truediv", "multiply")


def terms_of(walk: Walk, y: Value) -> list[Value]:
    """What a sum is of, residual sums within it opened."""
    terms: list[Value] = []
    queue = [y]
    while queue:
        v = walk.through(queue.pop(0))
        if is_sum(walk, v):
            queue = [*v.call.inputs, *queue]  # type: ignore[union-attr]
        else:
            terms.append(v)
    return terms


def is_sum(walk: Walk, v: Value) -> bool:
    call = v.call
    if v is walk.recording.x or call is None or call.op not in ("add", "radd") or len(call.inputs) != 2 or call.kwargs:
        return False
    return all(i.shape == v.shape for i in call.inputs) and not any(map(walk.bias, call.inputs))


def additions(walk: Walk, y: Value, terms: list[Value]) -> list[Recorded]:
    """The additions of a sum."""
    calls: list[Recorded] = []
    queue = [y]
    while queue:
        v = walk.through(queue.pop())
        if v not in terms and v.call is not None:
            calls.append(v.call)
            queue += v.call.inputs
    return calls


def stream(walk: Walk, term: Value, normed: bool) -> tuple[Value, float]:
    """The residual stream that a term of a sum is, and by which number it is multiplied; normed: 1 unless a norm of the
    sum follows.
    """
    for of_it in (False, True)[: 1 + normed]:
        v, factor = unscaled(walk, term) if of_it else (term, 1.0)
        if v is walk.recording.x or is_closed_sum(walk, v):
            return v, factor
    raise RefusedError("not the residual stream", term.call)


def unscaled(walk: Walk, v: Value) -> tuple[Value, float]:
    """A value before factors that are numbers, and their product."""
    factor, v = 1.0, walk.through(v)
    while v.call is not None and v.op in FACTORS and len(v.call.inputs) == 1:
        factor *= factor_of(v)
        walk.take(v.call, "residual multiplier")
        v = walk.through(v.call.inputs[0])
    return v, factor


def is_closed_sum(walk: Walk, v: Value) -> bool:
    """Whether a value is a norm of a sum: the stream of a post-norm layer."""
    taken = dict(walk.taken)
    found = walk.attempt(norm, walk, v)
    if found is not None and is_sum(walk, unscaled(walk, found.x)[0]):
        return True
    walk.taken = taken
    return False


def factor_of(v: Value) -> float:
    by = ratio(v.call.inputs[0].data, v.data, v.call.numbers)  # type: ignore[union-attr]
    if by is None:
        raise RefusedError(f"no rule takes {v.call}", v.call)
    return by
