"""Rules for the heads of attention: from the projections by norms and rotation to q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.eager.norm import norm as eager_norm
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.core import Core, Outer
from ckptfused.models.derive.rules.layouts import Laid, layouts
from ckptfused.models.derive.rules.masks import named
from ckptfused.models.derive.rules.pieces import Linear, NormPiece, linear, norm
from ckptfused.models.derive.rules.rotations import TURNS, Turned, turned
from ckptfused.models.derive.walk import CASTS, LAYOUT, Walk, arranges, close
from ckptfused.spec import QK_PLACES

_MOST = 60


class Heads(NamedTuple):
    """What is before the core: projections, norms, rotation."""

    heads: int
    kv_heads: int
    head_dim: int
    q: Linear
    k: Linear | None
    v: Linear | None
    interleaved: bool
    q_norm: NormPiece | None
    k_norm: NormPiece | None
    rope: str
    rotary_dim: int
    cos: Outer | None
    sin: Outer | None
    factor: float
    """The factor of the logits by which q and k were multiplied."""
    place: str = "head"
    """What the norms are of, as `spec.QK_PLACES`."""
    q_scale: Outer | None = None
    """Factors of q by position, after all else."""
    v_norm: NormPiece | None = None


class _Side(NamedTuple):
    """One of q, k and v, read back to its projection."""

    made: Linear
    norm: NormPiece | None
    tables: tuple[Value, ...]
    scale: Value | None
    """A factor of each position, after all else."""


def side(walk: Walk, end: Value, what: str) -> _Side:
    """The projection, the norm and the tables of q, k or v."""
    made: dict[Value, Linear] = {}
    norms: dict[Value, NormPiece] = {}
    tables: dict[Value, None] = {}
    seen: dict[Recorded, None] = {}
    start, scale = _scaled(walk, end)
    queue = [(start, end.call)]
    while queue:
        v, user = queue.pop(0)
        v = _one_of_stacked(walk, walk.same(v))
        if v in made or v in norms or v in tables or v.call in seen:
            continue
        if walk.outer(v):
            tables[v] = None
        elif (found := walk.attempt(linear, walk, v)) is not None:
            made[found.y] = found
        elif (normed := walk.attempt(norm, walk, v)) is not None:
            norms[v] = normed
            queue.append((normed.x, v.call))
        elif v.call is not None and v.op in TURNS and len(seen) < _MOST:
            seen[v.call] = None
            queue += ((i, v.call) for i in v.call.inputs)
        else:
            raise RefusedError(f"no rule takes {v}", v.call or user)
    for call in seen:
        walk.take(call, "heads" if call.op not in LAYOUT else "layout")
    if len(made) != 1 or len(norms) > 1:
        raise RefusedError(f"{what} comes of {len(made)} projections and {len(norms)} norms", end.call)
    return _Side(next(iter(made.values())), next(iter(norms.values()), None), tuple(tables), scale)


def _one_of_stacked(walk: Walk, v: Value) -> Value:
    """The value that was stacked, where this one is it again: the others in the stack do not matter to it."""
    if v.call is not None and arranges(v) and (stack := v.call.inputs[0]).op == "stack":
        for one in stack.call.inputs:  # type: ignore[union-attr]
            if one.shape == v.shape and torch.equal(one.data, v.data):
                walk.take(v.call, "layout")
                walk.take(stack.call, "heads")
                return walk.same(one)
    return v


def _scaled(walk: Walk, end: Value) -> tuple[Value, Value | None]:
    """What heads are a multiple of, and the factor of each position, or of each of each batch element; None without
    one. Of its numbers nothing is asked, for on few tokens they may be ones.
    """
    v = walk.through(end)
    batch, tokens = walk.recording.x.shape[:2]
    if v.call is not None and v.op in ("mul", "rmul", "multiply") and len(v.call.inputs) == 2:
        for a, s in (v.call.inputs, v.call.inputs[::-1]):
            sizes = [n for n in s.shape if n != 1]
            if walk.outer(s) and s.shape[-1:] == (1,) and sizes in ([tokens], [batch, tokens]):
                walk.take(v.call, "scale by position")
                walk.take_before("scale by position", s)
                while s.op in CASTS and s.call.inputs[0].data.is_floating_point():  # type: ignore[union-attr]
                    s = s.call.inputs[0]  # type: ignore[union-attr]
                return a, s
    return end, None


def _by_rows(scale: Value | None, tokens: int) -> Tensor | float:
    """A factor as it multiplies heads [B, T, H, D]."""
    return 1.0 if scale is None else scale.data.reshape(-1, tokens, 1, 1)


def heads(walk: Walk, found: Core, gate: Value | None = None) -> Heads:
    """The projections, norms and rotation before an attention core. gate: the product that makes q and, of each head
    after it, the output gate, where one does."""
    sides = {name: side(walk, v, name) for name, v in zip("qkv", (found.q, found.k, found.v), strict=True)}
    if sides["v"].tables:
        raise RefusedError("v has a rotation", found.v.call)
    if (v_norm := sides["v"].norm) is not None and (v_norm.weight or v_norm.bias):
        raise RefusedError("v has a norm with weights", found.v.call)
    if (scaled := next((n for n in "kv" if sides[n].scale is not None), None)) is not None:
        raise RefusedError(f"{scaled} is scaled by position", found.k.call)
    if gate is not None and sides["q"].made.y is not gate:
        raise RefusedError("an output gate beside something else than q", gate.call)
    if (sides["q"].norm is None) != (sides["k"].norm is None):
        raise RefusedError("only one of q and k has a norm", found.k.call)
    ends = dict(zip("qkv", (t.transpose(1, 2) for t in found.ends), strict=False))
    ends["q"] = ends["q"] / _by_rows(sides["q"].scale, found.ends[0].shape[2])
    trouble = RefusedError("the rows of the projections are not head by head", found.v.call)
    made = {name: one.made for name, one in sides.items()}
    for laid in layouts(made, found.ends[0].shape, gate is not None):
        if close(_repeated(_normed(walk, v_norm, laid.parts["v"]), ends["v"].shape[2]), ends["v"]):
            try:
                return _turned_alike(walk, found, sides, laid, ends)
            except RefusedError as error:
                trouble = error
    raise trouble


def _turned_alike(walk: Walk, found: Core, sides: dict[str, _Side], laid: Laid, ends: dict[str, Tensor]) -> Heads:
    trouble: list[RefusedError] = []
    for place in QK_PLACES if sides["q"].norm is not None else QK_PLACES[:1]:
        try:
            with walk.trial():
                pairs = (("q", found.q), ("k", found.k))
                by = [_placed(walk, sides[n], laid.parts[n], ends[n], at, place) for n, at in pairs]
            break
        except RefusedError as error:
            trouble.append(error)
    else:
        raise trouble[0]
    if by[0][:-1] != by[1][:-1]:
        raise RefusedError("q and k are turned in different ways", found.k.call)
    kind, wide, cos, sin, factor = by[0]
    norms = sides["q"].norm, sides["k"].norm
    sizes = ends["q"].shape[2], laid.parts["v"].shape[2], ends["q"].shape[3]
    of = (*sizes, *laid.maps, laid.interleaved, *norms, kind, wide, cos, sin, factor * by[1][-1], place)
    q_scale = None if (scale := sides["q"].scale) is None else Outer(named(walk, scale))
    return Heads(*of, q_scale, sides["v"].norm)


def _placed(walk: Walk, side: _Side, part: Tensor, end: Tensor, at: Value, place: str) -> Turned:
    """The rotation that makes the heads in `end` of those in `part`, the norm being of what `place` says."""
    normed: Callable[[Tensor], Tensor] = partial(_normed, walk, side.norm)
    if side.norm is not None:
        width = part.shape[-1] * (part.shape[2] if place == "row" else 1)
        if side.norm.x.shape[-1] != width:
            raise RefusedError(f"a norm of q or k over {side.norm.x.shape[-1]} values", at.call)
    count = end.shape[2]
    if place == "turned":
        return turned(walk, side.tables, _repeated(part, count), end, at, normed)
    part = normed(part.flatten(-2)).view(part.shape) if place == "row" else normed(part)
    return turned(walk, side.tables, _repeated(part, count), end, at, lambda t: t)


def _repeated(part: Tensor, heads: int) -> Tensor:
    return part.repeat_interleave(heads // part.shape[2], 2) if heads % part.shape[2] == 0 else part


def _normed(walk: Walk, found: NormPiece | None, part: Tensor) -> Tensor:
    if found is None:
        return part
    weight, bias = (walk.recording.roots.get(f"param:{name}") for name in (found.weight, found.bias))
    eps = torch.finfo(torch.float64).eps if found.eps is None else found.eps
    return eager_norm(part, weight, bias, found.kind, eps)
