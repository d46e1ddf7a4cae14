"""Rules for the heads of attention: from the projections by norms and rotation to q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.eager.norm import norm as eager_norm
from ckptfused.eager.rope import rope
from ckptfused.models.derive.attention import Core, Outer
from ckptfused.models.derive.pieces import Linear, NormPiece, linear, norm
from ckptfused.models.derive.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.walk import LAYOUT, Walk, arranges, close, ratio

_TURNS = LAYOUT | {"cat", "concat", "stack", "mul", "rmul", "add", "radd", "sub", "rsub", "neg", "div", "truediv"}
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
    """Of the logits, by what q and k were multiplied."""


class _Side(NamedTuple):
    """One of q, k and v, read back to its projection."""

    made: Linear
    norm: NormPiece | None
    tables: tuple[Value, ...]


def _side(walk: Walk, end: Value, what: str) -> _Side:
    """The projection, the norm and the tables of q, k or v."""
    made: dict[Value, Linear] = {}
    norms: dict[Value, NormPiece] = {}
    tables: dict[Value, None] = {}
    seen: dict[Recorded, None] = {}
    queue = [end]
    while queue:
        v = walk.same(queue.pop(0))
        if v in made or v in norms or v in tables or v.call in seen:
            continue
        if walk.outer(v):
            tables[v] = None
        elif (found := walk.attempt(linear, walk, v)) is not None:
            made[found.y] = found
        elif (normed := walk.attempt(norm, walk, v)) is not None:
            norms[v] = normed
            queue.append(normed.x)
        elif v.call is not None and v.op in _TURNS and len(seen) < _MOST:
            seen[v.call] = None
            queue += v.call.inputs
        else:
            raise RefusedError(f"no rule takes {v}", v.call)
    for call in seen:
        walk.take(call, f"heads of {what}" if call.op not in LAYOUT else "layout")
    if len(made) != 1 or len(norms) > 1:
        raise RefusedError(f"{what} comes of {len(made)} projections and {len(norms)} norms", end.call)
    return _Side(next(iter(made.values())), next(iter(norms.values()), None), tuple(tables))


def heads(walk: Walk, found: Core) -> Heads:
    """The projections, norms and rotation before an attention core."""
    q, k, v = _side(walk, found.q, "q"), _side(walk, found.k, "k"), _side(walk, found.v, "v")
    batch, t, d = found.q.shape[0], found.q.shape[2], found.q.shape[3]
    h = found.q.shape[1]
    width = q.made.y.shape[-1]
    joint = q.made.y is k.made.y
    if v.norm is not None or v.tables or (joint and v.made.y is not q.made.y):
        raise RefusedError("v has a norm or a rotation, or shares a product with one of q and k only", found.v.call)
    if not joint and len({id(side.made.y) for side in (q, k, v)}) != 3:
        raise RefusedError("two of q, k and v share a product", found.v.call)
    g = (width // d - h) // 2 if joint else k.made.y.shape[-1] // d
    if g < 1 or h % g:
        raise RefusedError(f"{h} query heads for {g} key heads", found.k.call)
    turned = found.k.data.transpose(-1, -2) if found.k_turned else found.k.data
    ends = [t.transpose(1, 2) for t in (found.q.data, turned, found.v.data)]
    for interleaved in (False, True) if joint and h == g else (False,):
        parts = _split(q.made, k.made, v.made, (h, g, d), (batch, t), joint, interleaved)
        if parts is not None and close(_repeated(parts[2], ends[2].shape[2]), ends[2]):
            break
    else:
        raise RefusedError("the rows of the projections are not head by head", found.v.call)
    turned_by: list[tuple[str, int, Outer | None, Outer | None, float]] = []
    for side, part, end, at in ((q, parts[0], ends[0], found.q), (k, parts[1], ends[1], found.k)):
        if side.norm is not None:
            part = _normed(part, side.norm, walk, at)
        turned_by.append(_turned(walk, side, part, end, at))
    (kind, wide, cos, sin, by), (k_kind, k_wide, k_cos, k_sin, k_by) = turned_by
    if (kind, wide, cos, sin) != (k_kind, k_wide, k_cos, k_sin):
        raise RefusedError("q and k are turned in different ways", found.k.call)
    if (q.norm is None) != (k.norm is None):
        raise RefusedError("only one of q and k has a norm", found.k.call)
    return Heads(
        h,
        g,
        d,
        q.made,
        None if joint else k.made,
        None if joint else v.made,
        interleaved,
        q.norm,
        k.norm,
        kind,
        wide,
        cos,
        sin,
        by * k_by,
    )


def _split(
    q: Linear, k: Linear, v: Linear, sizes: tuple[int, int, int], rows: tuple[int, int], joint: bool, interleaved: bool
) -> list[Tensor] | None:
    """q, k and v as [B, T, heads, D] by the layouts that a block knows."""
    h, g, d = sizes
    if interleaved:
        return list(q.y.data.reshape(*rows, h, 3 * d).chunk(3, -1)) if q.y.shape[-1] == 3 * h * d else None
    if joint and q.y.shape[-1] != (h + 2 * g) * d:
        return None
    parts = q.y.data.split((h * d, g * d, g * d), -1) if joint else tuple(made.y.data for made in (q, k, v))
    if [part.shape[-1] for part in parts] != [h * d, g * d, g * d]:
        return None
    return [part.reshape(*rows, -1, d) for part in parts]


def _repeated(part: Tensor, heads: int) -> Tensor:
    return part.repeat_interleave(heads // part.shape[2], 2) if heads % part.shape[2] == 0 else part


def _normed(part: Tensor, found: NormPiece, walk: Walk, at: Value) -> Tensor:
    if found.x.shape[-1] != part.shape[-1]:
        raise RefusedError("the norm of q or k is over all heads together, which has no kernel", at.call)
    weight, bias = (walk.recording.roots.get(f"param:{name}") for name in (found.weight, found.bias))
    eps = torch.finfo(torch.float64).eps if found.eps is None else found.eps
    return eager_norm(part, weight, bias, found.kind, eps)


def _turned(
    walk: Walk, side: _Side, part: Tensor, end: Tensor, at: Value
) -> tuple[str, int, Outer | None, Outer | None, float]:
    """The rotation, the tables and the factor that make the heads in `end` of those in `part`."""
    part = _repeated(part, end.shape[2])
    if not side.tables:
        return "none", 0, None, None, _factor(part, end, at)
    tables: dict[Outer, Tensor] = {}
    roots: set[str] = set()
    for v in side.tables:
        root = walk.same(v)
        while root.call is not None and (arranges(root) or root.op in ("cat", "stack")):
            walk.take(root.call, "layout")
            root = walk.same(root.call.inputs[0])
        if root.call is not None:
            raise RefusedError("the layer computes its rotary tables", root.call)
        roots.add(root.name)
        tables.update(_table(root, part.shape[1]))
    if len(roots) != 2:
        raise RefusedError(f"a rotation by {len(roots)} tables, expected cos and sin", at.call)
    for cos, sin in _pairs(tables):
        for wide in dict.fromkeys((tables[cos].shape[-1], 2 * tables[cos].shape[-1])):
            for kind in ("half", "interleaved"):
                if wide % 2 or wide > part.shape[-1] or tables[cos].shape != tables[sin].shape:
                    continue
                made = rope(part, tables[cos], tables[sin], kind, wide)
                if (by := ratio(made, end)) is not None:
                    return kind, wide, cos, sin, by
    raise RefusedError("a rotation that is neither by halves nor interleaved", at.call)


def _table(root: Value, length: int) -> dict[Outer, Tensor]:
    """A table as [T, r] or [B, T, r]."""
    table, form = root.data, "given"
    if not table.is_floating_point():
        raise RefusedError(f"a rotary table of type {table.dtype}")
    if table.dim() == 4 and 1 in (table.shape[1], table.shape[2]):
        form, table = "heads", table.squeeze(1 if table.shape[1] == 1 else 2)
    if table.dim() not in (2, 3):
        raise RefusedError(f"a rotary table of shape {list(root.shape)}")
    if root.name.startswith("buffer:"):
        form, table = "first rows", table[..., :length, :]
    if table.shape[-2] != length:
        raise RefusedError(f"a rotary table of shape {list(root.shape)}")
    found = {Outer(root.name, form): table}
    if table.shape[-1] % 2 == 0:
        found[Outer(root.name, f"{form}, first half")] = table[..., : table.shape[-1] // 2]
    return found


def _pairs(tables: dict[Outer, Tensor]) -> list[tuple[Outer, Outer]]:
    """Two tables in either order, arranged in the same way."""
    return [(a, b) for a in tables for b in tables if a.name != b.name and a.form == b.form]


def _factor(part: Tensor, end: Tensor, at: Value) -> float:
    by = ratio(part, end) if part.shape == end.shape else None
    if by is None:
        raise RefusedError("heads that are not the rows of a projection", at.call)
    return by
