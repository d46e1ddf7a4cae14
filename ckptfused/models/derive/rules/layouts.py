"""How the rows of projections are those of q, k and v: one product or several, side by side or head by head."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from torch import Tensor

from ckptfused.models.derive.rules.pieces import Linear


class Laid(NamedTuple):
    """One way in which q, k and v may lie in their products."""

    parts: dict[str, Tensor]
    """The numbers of each, [B, T, heads, D]."""
    maps: tuple[Linear, Linear | None, Linear | None]
    """The products as a block takes them: all in the first, or one each, which may be rows of one."""
    interleaved: bool


def layouts(made: dict[str, Linear], q_shape: tuple[int, ...], gated: bool = False) -> Iterator[Laid]:
    """Every way in which q, k and v may lie in the products that they come of; the numbers say which one is meant.

    gated: each head of q is followed by as much of something else.
    """
    batch, h, t, d = q_shape
    head = d * (1 + gated)
    shared = [[name for name in made if made[name].y is y] for y in {id(m.y): m.y for m in made.values()}.values()]
    for order in product(*map(permutations, shared)):
        for rows in dict.fromkeys(((batch, t), (t, batch))):
            if (g := _key_heads(made, order, h * head, d)) and h % g == 0:
                found = _laid(made, order, {"q": (h, head), "k": (g, d), "v": (g, d)}, d, rows)
                if found is not None:
                    yield found if rows == (batch, t) else found._replace(parts=_turned_round(found.parts))
    joint = made["q"]
    if len(shared) == 1 and joint.y.shape[-1] == 3 * h * d:
        for rows in dict.fromkeys(((batch, t), (t, batch))):
            if (y := by_rows(joint.y.data, rows)) is not None:
                parts = dict(zip("qkv", y.reshape(*rows, h, 3 * d).chunk(3, -1), strict=True))
                yield Laid(parts if rows == (batch, t) else _turned_round(parts), (joint, None, None), True)


def _key_heads(made: dict[str, Linear], order: tuple[tuple[str, ...], ...], q_width: int, d: int) -> int:
    """How many heads k and v have, 0 where widths do not fit."""
    found: set[int] = set()
    for names in order:
        keys = [name for name in names if name != "q"]
        width = made[names[0]].y.shape[-1] - (q_width if "q" in names else 0)
        if width < 0 or (width and not keys) or width % (d * max(1, len(keys))):
            return 0
        found |= {width // d // len(keys)} if keys else set()
    return found.pop() if len(found) == 1 else 0


def _laid(
    made: dict[str, Linear],
    order: tuple[tuple[str, ...], ...],
    heads: dict[str, tuple[int, int]],
    d: int,
    rows: tuple[int, int],
) -> Laid | None:
    """Heads of d entries, of which there are so many, so far apart, of each name."""
    parts: dict[str, Tensor] = {}
    maps: dict[str, Linear] = {}
    for names in order:
        y = by_rows(made[names[0]].y.data, rows)
        if y is None:
            return None
        at = 0
        for name in names:
            count, apart = heads[name]
            width = count * apart
            parts[name] = y[..., at : at + width].reshape(*rows, count, apart)[..., :d]
            maps[name] = made[name] if len(names) == 1 else made[name].part(at, width)
            at += width
    if order == (("q", "k", "v"),):
        return Laid(parts, (made["q"], None, None), False)
    return Laid(parts, (maps["q"], maps["k"], maps["v"]), False)


def by_rows(y: Tensor, rows: tuple[int, int]) -> Tensor | None:
    """A product as [*rows, W]; None where its rows are others."""
    if y.dim() > 2 and tuple(y.shape[:2]) != rows:
        return None
    return y.reshape(*rows, y.shape[-1]) if y.numel() == rows[0] * rows[1] * y.shape[-1] else None


def _turned_round(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.transpose(0, 1) for name, part in parts.items()}
