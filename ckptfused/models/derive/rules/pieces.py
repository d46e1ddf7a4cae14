"""Rules for projections and norms: a short walk finds the inputs, the numbers say what was computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.compat.pytree import tree_leaves
from ckptfused.eager.norm import norm as eager_norm
from ckptfused.models.derive.recording.names import words_of
from ckptfused.models.derive.recording.recorder import RefusedError, Value
from ckptfused.models.derive.rules.masks import named
from ckptfused.models.derive.walk import Walk, arranges
from ckptfused.spec import BIASED_NORMS, NORMS

_TURNED = ("t", "T", "transpose", "mT", "permute", "swapaxes")
_NORM = words_of(
    "add radd sub rsub mul rmul multiply div truediv rtruediv pow square rsqrt sqrt mean var layer_norm rms_norm",
    "reciprocal neg normalize",
)
_REDUCES = ("mean", "var", "layer_norm", "rms_norm", "normalize")
MODULATION = "modulation"
_MOST = 40
"""Calls of one norm or activation at most."""


class Linear(NamedTuple):
    """A projection: the names of its weight and bias, a parameter or what a call makes, what it takes and makes."""

    weight: str
    bias: str
    transposed: bool
    x: Value
    y: Value
    rows: tuple[int, int] | None = None
    """The first and the number of those of its rows that are meant; None: all."""
    module: str = ""
    """The name of the module in whose forward the product is."""
    columns: tuple[int, int] | None = None
    """The first and the number of those of its columns that are meant; None: all."""

    def part(self, first: int, count: int) -> Linear:
        """The projection by so many of its rows."""
        return self._replace(rows=(first + (0 if self.rows is None else self.rows[0]), count))


class NormPiece(NamedTuple):
    """A norm: its kind as `spec.NORMS`, eps (None: by the type of x), its tensors' names, what it takes."""

    kind: str
    eps: float | None
    weight: str
    bias: str
    x: Value
    gain: str = ""
    """The name of a vector of each batch element by which its result is multiplied (adaLN), from outside."""
    shift: str = ""
    """The name of such a vector that is added then."""
    factor: str = ""
    """The name of one number by which it is multiplied (ReZero)."""


def linear(walk: Walk, v: Value) -> Linear:
    """The projection that made a value. **Raises** `RefusedError` where none did."""
    v = walk.same(v)
    call = v.call
    if call is None:
        raise RefusedError("expected a projection, found what the layer is given")
    if (rows := walk.part(v)) is not None:
        walk.take(call, "projection")
        return linear(walk, call.inputs[0])._replace(rows=rows, y=v)
    bias, operands = "", call.inputs
    if call.op == "linear":
        w = walk.parameter(operands[1])
        bias = "" if len(operands) < 3 else walk.parameter(operands[2]) or _made_bias(walk, operands[2], v)
        if w and (bias or len(operands) == 2):
            walk.take(call, "projection")
            return Linear(w, bias, False, operands[0], v, module=call.module)
        parts = [part for part in (_rows_of(walk, one) for one in operands[1:]) if part is not None]
        if len(parts) == len(operands) - 1 and len({rows for _, rows in parts}) == 1:
            (w, rows), *biases = parts
            walk.take(call, "projection")
            return Linear(w, biases[0][0] if biases else "", False, operands[0], v, rows, call.module)
    elif (
        call.op == "conv1d"
        and operands[1].shape[2:] == (1,)
        and all(n in (0, 1, None) for n in tree_leaves(call.numbers))
    ):
        if w := walk.parameter(operands[1]):
            bias = walk.parameter(operands[2]) if len(operands) > 2 else ""
            walk.take(call, "projection")
            return Linear(w, bias, False, operands[0], v, module=call.module)
    elif call.op == "addmm" and not call.kwargs and (w := walk.parameter(operands[2])):
        bias = walk.parameter(operands[0])
        if bias:
            walk.take(call, "projection")
            return Linear(w, bias, True, operands[1], v, module=call.module)
    elif call.op in ("matmul", "mm"):
        right = walk.same(operands[1])
        if w := walk.parameter(right):
            walk.take(call, "projection")
            return Linear(w, "", True, operands[0], v, module=call.module)
        if right.call is not None and right.op in _TURNED and (w := walk.parameter(right.call.inputs[0])):
            walk.take(right.call, "projection")
            walk.take(call, "projection")
            return Linear(w, "", False, operands[0], v, module=call.module)
    elif call.op in ("add", "radd") and len(operands) == 2 and not call.kwargs:
        for a, b in (operands, operands[::-1]):
            if name := walk.bias(b):
                found = linear(walk, walk.through(a))
                if not found.bias and found.y.shape[-1:] == b.shape[-1:]:
                    walk.take_before("projection", b)
                    walk.take(call, "projection")
                    return found._replace(bias=name, y=v)
    raise RefusedError(f"no rule takes {call}", call)


def side_by_side(walk: Walk, made: Linear) -> list[Linear]:
    """A projection of values side by side as one of each, the first of them with the bias; itself of any other."""
    both = walk.same(made.x)
    call = both.call
    if call is None or call.op not in ("cat", "concat") or call.given(1, "dim", 0) not in (-1, both.data.dim() - 1):
        return [made]
    walk.take(call, "projection")
    found: list[Linear] = []
    at = 0
    for x in call.inputs:
        found.append(made._replace(bias=made.bias if not found else "", x=x, columns=(at, x.shape[-1])))
        at += x.shape[-1]
    return found


def _rows_of(walk: Walk, v: Value) -> tuple[str, tuple[int, int]] | None:
    """The parameter whose rows, one after the other, a value is, and the first of them and their number."""
    root = walk.through(v, "projection")
    if not (name := walk.parameter(root)) or v.shape[1:] != root.shape[1:]:
        return None
    count = v.shape[0]
    for first in range(root.shape[0] - count + 1):
        if torch.equal(root.data[first : first + count], v.data):
            return name, (first, count)
    return None


def _made_bias(walk: Walk, bias: Value, y: Value) -> str:
    """The name of a bias that the layer makes of what does not depend on x (timm's EVA: parts side by side); "" of any
    other.
    """
    if bias.call is None or bias.shape != y.shape[-1:] or not walk.apart(bias):
        return ""
    walk.take_before("projection", bias)
    return named(walk, bias)


def norm(walk: Walk, v: Value) -> NormPiece:
    """The norm over the last dimension that made a value. **Raises** `RefusedError` where none did."""
    v = walk.same(v)
    if v.call is None or v.op not in _NORM:
        raise RefusedError("not a norm")
    for reduced in _reduced(walk, v):
        found = walk.attempt(_norm_of, walk, v, reduced)
        if found is not None:
            return found
    raise RefusedError(f"no rule takes {v.call}", v.call)


def _reduced(walk: Walk, v: Value) -> list[Value]:
    """What the nearest reductions before a value are of: the candidates for a norm's input."""
    found: dict[Value, None] = {}
    queue: list[Value] = [v]
    seen: set[Value] = set()
    with_taken = dict(walk.taken)
    while queue and len(found) < 4 and len(seen) < _MOST:
        v = walk.same(queue.pop(0))
        if v.call is None or v in seen or v.op not in _NORM:
            continue
        seen.add(v)
        if v.op in _REDUCES:
            inner = walk.same(v.call.inputs[0])
            for _ in range(3):
                found[inner] = None
                if inner.call is None or inner.op not in ("pow", "square", "mul", "sub"):
                    break
                inner = walk.same(inner.call.inputs[0])
        else:
            queue += v.call.inputs
    walk.taken = with_taken
    return list(found)


def _norm_of(walk: Walk, v: Value, x: Value) -> NormPiece:
    params: dict[str, Tensor] = {}
    vectors: dict[str, Value] = {}
    numbers: dict[float | None, None] = {}
    seen: dict[Value, None] = {}
    queue, met = [v], False
    while queue:
        at = walk.same(queue.pop())
        if at is x:
            met = True
        elif walk.vector_of_samples(at):
            vectors[named(walk, at, drawn=True)] = at
        elif name := walk.parameter(at):
            params[name] = at.data
        elif at.call is not None and at.op in _NORM and len(seen) < _MOST:
            if at not in seen:
                seen[at] = None
                queue += at.call.inputs
                numbers.update(dict.fromkeys(n for n in at.call.numbers if type(n) is float and 0 < n < 0.1))
                if at.op == "rms_norm" and at.call.given(3, "eps") is None:
                    numbers[None] = None
                if at.op == "layer_norm" and at.call.given(4, "eps") is None:
                    numbers[1e-5] = None
                if at.op == "normalize":  # by the larger one of x's length and this number, not by a sum
                    numbers[float(at.call.given(3, "eps", 1e-12)) ** 2 / x.shape[-1]] = None
        else:
            raise RefusedError("not a norm")
    if not met or len(params) > 2 or len(vectors) > 2:
        raise RefusedError("not a norm")
    if any(t.shape != x.shape[-1:] for t in params.values()):
        raise RefusedError("not a norm")
    values = {**params, **{name: at.data for name, at in vectors.items()}}
    for eps in numbers:
        number = torch.finfo(torch.float64).eps if eps is None else eps
        for kind, names in _ways(params, vectors):
            weight, bias = combined(*map(values.get, names))
            function = partial(eager_norm, weight=weight, bias=bias, kind=kind, eps=number)
            if walk.agrees(v, [x], function, [_of_all_sizes(x.data)]):
                for at in seen:
                    walk.take(at.call, "norm")
                walk.take_before(MODULATION, *vectors.values())
                w, b, gain, shift = names
                return NormPiece(kind, eps, w, b, x, gain, shift)
    raise RefusedError("not a norm")


def _of_all_sizes(x: Tensor) -> Tensor:
    """Rows of every order of magnitude: where eps is, the largest of them do not tell."""
    return x * torch.logspace(-8, 4, x[..., 0].numel(), dtype=x.dtype).view(*x.shape[:-1], 1)


def combined(
    weight: Tensor | None, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of the norm that is a norm with these, times the gain and shifted."""
    bias = bias * gain if bias is not None and gain is not None else bias
    bias = shift if bias is None else bias if shift is None else bias + shift
    return gain if weight is None else weight if gain is None else weight * gain, bias


def _ways(params: Collection[str], vectors: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Kinds of norms, each with which of the names are its weight and bias, a gain and a shift; "" for none."""
    own = [(*names, "", "")[:2] for names in permutations(params)]
    given = [(*names, "", "")[:2] for names in permutations(vectors)]
    given += [("", name) for name in vectors if len(vectors) == 1]
    for kind, (w, b), (gain, shift) in product(NORMS[1:], own, given):
        if not b or kind in BIASED_NORMS:
            yield kind, (w, b, gain, shift)


def layer_scale(walk: Walk, v: Value) -> NormPiece:
    """The product of a value and a vector that is learnt (LayerScale), or one for each batch element, or one number
    (ReZero). **Raises** `RefusedError` of any other value.
    """
    call = walk.same(v).call
    if call is not None and call.op in ("mul", "rmul", "multiply") and len(call.inputs) == 2:
        for x, weight in (call.inputs, call.inputs[::-1]):
            entries = weight.data.numel() == v.shape[-1] == weight.shape[-1:].numel()
            if (name := walk.parameter(weight)) and entries and x.shape == v.shape:
                walk.take(call, "LayerScale")
                return NormPiece("layerscale", 1e-5, name, "", x)
            if walk.vector_of_samples(weight) and x.shape == v.shape:
                walk.take(call, "LayerScale")
                walk.take_before(MODULATION, weight)
                return NormPiece("layerscale", 1e-5, "", "", x, gain=named(walk, weight, drawn=True))
            of_a_sum = walk.same(x).op in ("add", "radd")  # Gemma 4's last product is of all
            if weight.data.numel() == 1 and walk.apart(weight) and x.shape == v.shape and not of_a_sum:
                walk.take(call, "LayerScale")
                walk.take_before("LayerScale", weight)
                return NormPiece("layerscale", 1e-5, "", "", x, factor=named(walk, weight, drawn=True))
    raise RefusedError("not LayerScale", call)


def layout_only(walk: Walk, v: Value, end: Value) -> bool:
    """Whether only layout is between two values."""
    while v is not end:
        v = walk.same(v)
        if v is end:
            break
        if v.call is None or not arranges(v):
            return False
        walk.take(v.call, "layout")
        v = v.call.inputs[0]
    return True
