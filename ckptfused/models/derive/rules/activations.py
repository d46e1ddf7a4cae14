"""The rule for an FFN's hidden value: which activation made it, and of which projections."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ckptfused.eager.activation import FUNCTIONS, activation
from ckptfused.models.derive.recording.names import words_of
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.coefficients import Coefficients, xielu_of
from ckptfused.models.derive.rules.pieces import Linear, linear
from ckptfused.models.derive.walk import Walk, close, spread
from ckptfused.spec import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS

_ELEMENTWISE = words_of(
    "add radd sub rsub mul rmul multiply div truediv rtruediv pow square sqrt tanh erf sigmoid silu gelu relu exp",
    "neg rpow reciprocal",
)
_MOST = 40
"""Calls of one activation at most."""


class Hidden(NamedTuple):
    """An FFN's hidden value: the activation and its projections. up None: `first` makes gate and up."""

    act: str
    first: Linear
    up: Linear | None
    coefficients: Coefficients | None = None
    """The coefficients of an activation that has some."""


def hidden(walk: Walk, h: Value) -> Hidden:
    """The activation that made a hidden value, and of what. **Raises** `RefusedError` where no rule reads it."""
    trained = walk.attempt(xielu_of, walk, h)
    if trained is not None:
        made = linear(walk, walk.through(trained[0]))
        if _whole(trained[0], made):
            return Hidden("xielu", made, None, trained[1])
    leaves: dict[Value, Linear] = {}
    calls: dict[Recorded, None] = {}
    queue = [(h, h.call)]
    while queue:
        v, user = queue.pop(0)
        v = walk.same(v)
        if v in leaves or (v.call is not None and v.call in calls):
            continue
        found = walk.attempt(lambda v=v: linear(walk, walk.through(v)))
        if found is not None:
            leaves[v] = found
        elif v.call is not None and v.op in _ELEMENTWISE and len(calls) < _MOST:
            calls[v.call] = None
            queue += ((i, v.call) for i in v.call.inputs)
        else:
            raise RefusedError(f"no rule takes {v}", v.call or user)
    for call in calls:
        walk.take(call, "activation")
    values = list(leaves)
    if len(values) == 1 and calls:
        for act in PLAIN_ACTIVATIONS:
            if walk.agrees(h, values, FUNCTIONS[act], _far_and_near(values[0])) and _whole(
                values[0], leaves[values[0]]
            ):
                return Hidden(act, leaves[values[0]], None)
    elif len(values) == 2:
        for gate, up in (values, values[::-1]):
            for act in GATED_ACTIVATIONS:
                applied = partial(activation, act=act)
                if gate.shape == up.shape and walk.agrees(h, [gate, up], applied, _far_and_near(gate)):
                    return _gated(act, gate, up, leaves[gate], leaves[up])
    raise RefusedError("the activation has no kernel", next(iter(calls), h.call))


def _far_and_near(v: Value) -> list[Tensor]:
    """Values beside those of a recording, which are of unit size."""
    return [spread(v.data, -most, most) for most in (60.0, 1e-3)]


def _gated(act: str, gate: Value, up: Value, first: Linear, second: Linear) -> Hidden:
    if first.y is not second.y:
        if _whole(gate, first) and _whole(up, second):
            return Hidden(act, first, second)
        raise RefusedError("gate or up is a part of a product", gate.call)
    halves = first.y.data.reshape(*gate.shape[:-1], -1).chunk(2, -1)
    if len(halves) == 2 and close(gate.data, halves[0]) and close(up.data, halves[1]):
        return Hidden(act, first, None)
    if len(halves) == 2 and close(gate.data, halves[1]) and close(up.data, halves[0]):
        width = halves[0].shape[-1]
        return Hidden(act, first.part(width, width), first.part(0, width))
    raise RefusedError("the rows of gate and up are not one after the other", gate.call)


def _whole(v: Value, made: Linear) -> bool:
    return v.data.numel() == made.y.data.numel()
