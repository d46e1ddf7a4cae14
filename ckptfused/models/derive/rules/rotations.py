"""Rules for the rotation of q and k, and for the tables of cosines and sines that it is by."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.eager.rope import rope
from ckptfused.models.derive.recording.evaluate import once
from ckptfused.models.derive.recording.recorder import RefusedError, Value
from ckptfused.models.derive.rules.core import Outer
from ckptfused.models.derive.rules.masks import named
from ckptfused.models.derive.walk import LAYOUT, Walk, arranges, ratio

TURNS = LAYOUT | {
    *("cat", "concat", "stack", "mul", "rmul", "add", "radd", "sub", "rsub", "neg", "div", "truediv"),
    *("view_as_complex", "view_as_real", "empty_like", "zeros_like", "setitem"),
}
Turned = tuple[str, int, Outer | None, Outer | None, float]
"""Kind, width, tables and factor of a rotation."""
_MOST_SAID = 64
MOST_FIRST = 16
"""Tokens at the front that tables leave out: a class token and registers (DINOv3)."""
_UNTURNED = {"ones first": 1.0, "zeros first": 0.0}
"""Forms of cosines and sines with rows for those tokens, by which nothing is turned."""
_BOTH = (("real", "imaginary"), ("first of two", "second of two"))
"""Forms of a table that holds cosines and sines: complex numbers, or pairs in the last dimension."""


def turned(
    walk: Walk, tables: tuple[Value, ...], part: Tensor, end: Tensor, at: Value, last: Callable[[Tensor], Tensor]
) -> Turned:
    """The rotation that makes the heads in `end` of those in `part`, both [B, T, heads, D]. last: what comes then."""
    if not tables:
        return "none", 0, None, None, _factor(last(part), end, at)
    for roots in _roots(walk, tables):
        known = {outer: table for root in roots for outer, table in _table(walk, root, part.shape[1], at).items()}
        pairs = [(cos, sin) for cos, sin in product(known, known) if _belong(cos, sin)]
        if pairs:
            break
    else:
        raise RefusedError(f"a rotation by {len(tables)} tables, expected cos and sin", at.call)
    found: dict[tuple[str, int], Turned] = {}
    for cos, sin in pairs:
        for wide in dict.fromkeys((known[cos].shape[-1], 2 * known[cos].shape[-1])):
            for kind in ("half", "interleaved"):
                if wide % 2 or wide > part.shape[-1] or known[cos].shape != known[sin].shape:
                    continue
                for sign, by_sin in ((1, sin), (-1, sin._replace(form=f"{sin.form}, negated"))):
                    made = last(rope(part, known[cos], sign * known[sin], kind, wide))
                    if (by := ratio(made, end)) is not None:
                        # Of two entries the halves are the neighbours.
                        found.setdefault((kind if wide > 2 else "half", sign), (kind, wide, cos, by_sin, by))
    if len(found) > 1:
        raise RefusedError("tables that turn too little to tell how", at.call)
    if found:
        return next(iter(found.values()))
    raise RefusedError("a rotation that is neither by halves nor interleaved", at.call)


def _roots(walk: Walk, tables: tuple[Value, ...]) -> Iterator[list[Value]]:
    """The values of which tables are arranged, one or two: arguments or buffers, then what is computed of these."""
    chains: list[list[Value]] = []
    for v in tables:
        chain = [walk.same(v)]
        while (call := chain[-1].call) is not None and (
            arranges(chain[-1]) or call.op in ("cat", "stack", "view_as_complex", "neg")
        ):
            chain.append(walk.same(call.inputs[0]))
        chains.append(chain)
    walk.take_before("tables", *tables)
    for steps in range(1, max(map(len, chains)) + 1):
        roots = list(dict.fromkeys(chain[-min(steps, len(chain))] for chain in chains))
        if len(roots) <= 2:
            yield roots


def _table(walk: Walk, root: Value, length: int, at: Value) -> dict[Outer, Tensor]:
    """A table as [T, r] or [B, T, r], in every way in which it may be meant."""
    table, name = root.data, named(walk, root)
    tries: list[tuple[str, Tensor]] = []
    if table.is_complex():
        tries = list(zip(_BOTH[0], (table.real, table.imag), strict=True))
    elif table.is_floating_point():
        tries = [("given", table)]
        if table.dim() > 2 and table.shape[-1] == 2:
            tries += zip(_BOTH[1], table.unbind(-1), strict=True)
    found: dict[Outer, Tensor] = {}
    for form, one in tries:
        if one.dim() == 4 and 1 in (one.shape[1], one.shape[2]):
            form, one = f"{form}, heads", one.squeeze(1 if one.shape[1] == 1 else 2)
        if one.dim() == 3 and one.shape[0] == length and one.shape[1] in (1, walk.batch):
            form, one = f"{form}, tokens first", one.transpose(0, 1)
        if one.dim() not in (2, 3) or (one.dim() == 3 and one.shape[0] not in (1, walk.batch)):
            continue
        if root.name.startswith("buffer:"):
            form, one = f"{form}, first rows", one[..., :length, :]
        ways = {"": one} if one.shape[-2] == length else _with_first(one, length)
        for rows, made in ways.items():
            form_of = f"{form}{rows}"
            found[Outer(name, form_of)] = made
            if one.shape[-1] % 2 == 0 and form.startswith("given"):
                found[Outer(name, f"{form_of}, first half")] = made[..., : one.shape[-1] // 2]
    if not found:
        raise RefusedError(f"a rotary table of shape {list(root.shape)} and type {table.dtype}", at.call)
    return found


def _with_first(table: Tensor, length: int) -> dict[str, Tensor]:
    """A table with rows for the tokens at the front that it leaves out, by the end of its form."""
    if not 0 < length - table.shape[-2] <= MOST_FIRST:
        return {}
    return {f", {form}": _padded(table, length, form) for form in _UNTURNED}


def _padded(table: Tensor, length: int, form: str) -> Tensor:
    return F.pad(table, (0, 0, length - table.size(-2), 0), value=_UNTURNED[form])


def table_of(table: Tensor, form: str, length: int) -> Tensor:
    """A table as the block takes it, by what `turned` called it; one that is computed is so once."""
    if form.endswith(", negated"):
        bare = form.removesuffix(", negated")
        return once((table,), (form, length), lambda: -table_of(table, bare, length))
    if any(unturned in form for unturned in _UNTURNED):
        return once((table,), (form, length), lambda: _made(table, form, length))
    return _made(table, form, length)


def is_computed(form: str) -> bool:
    """Whether a table in this form is made of the one that is given."""
    return form.endswith("negated") or any(unturned in form for unturned in _UNTURNED)


def _made(table: Tensor, form: str, length: int) -> Tensor:
    kind, *then = form.split(", ")
    if kind in _BOTH[0]:
        table = table.real if kind == "real" else table.imag
    elif kind in _BOTH[1]:
        table = table[..., _BOTH[1].index(kind)]
    if "heads" in then:
        table = table.squeeze(1 if table.size(1) == 1 else 2)
    if "tokens first" in then:
        table = table.transpose(0, 1)
    if "first rows" in then:
        table = table[..., :length, :]
    for unturned in [name for name in then if name in _UNTURNED]:  # Dynamo 2.11 intersects no keys with a list
        table = _padded(table, length, unturned)
    return table[..., : table.size(-1) // 2] if "first half" in then else table


def _belong(cos: Outer, sin: Outer) -> bool:
    """Whether two are the tables of one rotation: two tensors in one form, or the two sides of one."""
    if cos.name != sin.name:
        forms = cos.form.replace("ones first", "rows first"), sin.form.replace("zeros first", "rows first")
        return forms[0] == forms[1] and cos.form.startswith("given")
    sides = cos.form.split(", ")[0], sin.form.split(", ")[0]
    return sides in _BOTH or sides[::-1] in _BOTH


def _factor(part: Tensor, end: Tensor, at: Value) -> float:
    by = ratio(part, end) if part.shape == end.shape else None
    if by is None:
        raise RefusedError("heads that are not the rows of a projection", at.call)
    return by


def like_table(t: Tensor, made: Tensor) -> Tensor:
    """Random numbers whose halves, or neighbours, are the same where those of `t` are."""
    if t.size(-1) % 2 or t.dim() < 2 or made.size(-1) != t.size(-1):
        return made
    half = t.size(-1) // 2
    first = made[..., :half]
    if t.is_meta or torch.equal(t[..., :half], t[..., half:]):
        return torch.cat((first, first), -1)
    if torch.equal(t[..., ::2], t[..., 1::2]):
        return first.repeat_interleave(2, -1)
    return made


_SAID: OrderedDict[int, tuple[Any, Any, bool]] = OrderedDict()
"""What was found out of tables that are on a CPU, by identity: layers share them."""


def still_says_twice(t: Tensor, form: str, kind: str, width: int) -> bool:
    """`says_twice` of a call's table, at which is looked once a version; not on a GPU, which would have to be waited
    for: there the first call of a shape tells.
    """
    if torch.compiler.is_compiling() or not t.is_cpu or t.is_inference():
        return True
    how = (t._version, form, kind, width)
    known = _SAID.get(id(t))
    if known is None or known[0]() is not t or known[1] != how:
        known = _SAID[id(t)] = (weakref.ref(t), how, says_twice(t, form, kind, width))
        while len(_SAID) > _MOST_SAID:
            _SAID.popitem(last=False)
    return known[2]


def says_twice(t: Tensor, form: str, kind: str, width: int) -> bool:
    """Whether a table that is as wide as what is turned says each number twice, of which a block reads one."""
    halved = "first half" in form
    if t.is_meta or t.is_complex() or not (halved or t.size(-1) == width):
        return True
    half = t.size(-1) // 2
    by_halves = halved or kind == "half"
    return torch.equal(*((t[..., :half], t[..., half:]) if by_halves else (t[..., ::2], t[..., 1::2])))
