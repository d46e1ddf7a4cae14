"""A rule for xIELU, the activation with coefficients, which the layer makes of what it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.eager.activation import xielu
from ckptfused.models.derive.recording.names import words_of
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.core import Outer
from ckptfused.models.derive.rules.masks import named
from ckptfused.models.derive.walk import Walk, spread
from ckptfused.spec import COEFFICIENTS_SLOT

_LEAST = ("min", "minimum")
_BRANCHES = words_of("add radd sub rsub mul rmul multiply pow square expm1 neg", *_LEAST)
_MOST = 12
"""Calls of one branch at most."""


class Coefficients(NamedTuple):
    """The coefficients of an activation, by the names of what they are."""

    made_of: tuple[Outer | None, ...]
    numbers: tuple[float, ...]
    """The coefficients that the code has as numbers, and zeros."""

    def slots(self, outer: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Their slot and tensor. outer: what stands outside, by name."""
        given = [None if t is None else outer[t.name].reshape(1) for t in self.made_of]
        like = next(t for t in given if t is not None)
        of = (like.new_full((1,), n) if t is None else t for t, n in zip(given, self.numbers, strict=True))
        yield COEFFICIENTS_SLOT, torch.cat([*of])


class _Branch(NamedTuple):
    calls: list[Recorded]
    coefficients: dict[Value | float, None]
    least: list[Value | float]
    """What x is held below."""


def xielu_of(walk: Walk, h: Value) -> tuple[Value, Coefficients]:
    """What a value is xIELU of, and its coefficients. **Raises** `RefusedError` of any other value."""
    call = walk.same(h).call
    if call is None or call.op != "where" or len(call.inputs) != 3:
        raise RefusedError("not xIELU", call)
    positive = walk.same(call.inputs[0]).call
    if positive is None or positive.op != "gt" or len(positive.inputs) != 1 or positive.given(1, "other") != 0:
        raise RefusedError("not xIELU", call)
    x = walk.same(positive.inputs[0])
    above, below = (_branch(walk, v, x) for v in call.inputs[1:])
    if len(above.coefficients) == 2 and not above.least and len(below.least) == 1:
        eps = below.least[0]
        for a, b in permutations(above.coefficients):
            rest = [n for n in below.coefficients if n is not b and n != b]
            of = (a, *rest, b, eps)
            if len(of) == 4 and _are(walk, h, x, torch.stack([*map(_number, of)])):
                for one in (call, positive, *above.calls, *below.calls):
                    walk.take(one, "activation")
                values = [v for v in of if isinstance(v, Value)]
                if not values:
                    break
                walk.take_before("activation", *values)
                made_of = (Outer(named(walk, v)) if isinstance(v, Value) else None for v in of)
                return x, Coefficients((*made_of,), tuple(0.0 if isinstance(v, Value) else v for v in of))
    raise RefusedError("the activation has no kernel", call)


def _are(walk: Walk, h: Value, x: Value, of: Tensor) -> bool:
    """Whether a value is xIELU with these coefficients: of x, of what is large, and on both sides of eps."""
    eps = float(of[3])
    probes = (spread(x.data, -60.0, 60.0), spread(x.data, 2 * eps, -eps))
    return walk.agrees(h, [x], partial(xielu, coefficients=of), probes)


def _branch(walk: Walk, y: Value, x: Value) -> _Branch:
    """The calls that make a branch of x and of numbers, and these numbers."""
    found = _Branch([], {}, [])
    single = lambda v: v.data.numel() == 1 and walk.apart(v)  # noqa: E731
    queue = [y]
    while queue:
        v = walk.same(queue.pop())
        if v is x or v.call in found.calls:
            continue
        if single(v):
            found.coefficients[v] = None
            continue
        if v.call is None or v.op not in _BRANCHES or len(found.calls) == _MOST:
            raise RefusedError(f"no rule takes {v}", v.call)
        found.calls.append(v.call)
        if v.op not in _LEAST:
            found.coefficients.update((n, None) for n in v.call.numbers if type(n) is float)
            queue += v.call.inputs
            continue
        held = [walk.same(i) for i in v.call.inputs]
        if len(held) != 2 or v.call.kwargs or held[0] is not x or not single(held[1]):
            raise RefusedError(f"no rule takes {v}", v.call)
        found.least.append(held[1])
    return found


def _number(v: Value | float) -> Tensor:
    return v.data.detach().reshape(()).double() if isinstance(v, Value) else torch.tensor(v, dtype=torch.float64)
