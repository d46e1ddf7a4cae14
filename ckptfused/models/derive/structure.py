"""Whether recordings of one layer are of one computation at several sizes: same calls, numbers that follow the size."""

from __future__ import annotations

from typing import Any

import torch

from ckptfused.compat.pytree import tree_leaves
from ckptfused.models.derive.recording.record import Recording
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError
from ckptfused.models.derive.resized import Sizes
from ckptfused.models.derive.rules.mask_forms import HIDES
from ckptfused.models.derive.rules.rotations import MOST_FIRST

_CASTS = ("to", "float", "double", "type", "type_as", "contiguous", "clone")


def same_structure(a: Recording, b: Recording) -> None:
    """**Raises** `RefusedError` at the first call in which two recordings differ but for sizes."""
    of = [Sizes(*one.x.shape[:2]) for one in (a, b)]
    steps, others = _steps(a), _steps(b)
    for one, other in zip(steps, others, strict=False):
        if one[:-2] != other[:-2] or len(one[-2]) != len(other[-2]):
            raise RefusedError("another call at another shape, type or length", other[-1])
        if not all(_number_follows(pair, of) for pair in zip(one[-2], other[-2], strict=True)):
            raise RefusedError("another number at another shape, type or length", other[-1])
    if len(steps) != len(others):
        raise RefusedError("other calls at another shape, type or length", b.y.call)


def attends_first(recording: Recording) -> bool:
    """Whether a recording attends over the first dimension of x, which then is [T, B, C]."""
    keys = {"scaled_dot_product_attention": (1, -2), "softmax": (0, -1)}
    attentions = ((call.inputs, *keys[call.op]) for call in recording.calls if call.op in keys)
    shapes = ((of[i].shape, dim) for of, i, dim in attentions if len(of) > i and of[i].data.dim() > 2)
    return any(shape[dim] == recording.x.shape[0] for shape, dim in shapes)


def same_window(proved: int, here: int, tokens: int) -> bool:
    """Whether windows that were seen, the second at a length, may be one: 0, all that there is, may be a wider one."""
    return here == proved or not proved or (not here and tokens <= proved)


def _steps(a: Recording) -> list[Any]:
    """The calls on which the result depends, casts aside: what, of which others, with which numbers, where; then the
    whole numbers, which may be sizes, and the call.
    """
    places: dict[int, Any] = {}

    def place(v: Any) -> Any:
        while v.call is not None and v.call.op in _CASTS:
            v = v.call.inputs[0]
        return v.name if v.call is None else (places[v.call.number], v.index)

    steps: list[Any] = []
    ends = (a.y, a.end, *a.beside)
    for call in a.before(*ends):
        if call.op in _CASTS:
            continue
        places[call.number] = len(steps)
        numbers = tuple(
            -torch.inf if type(n) is float and n <= HIDES else n
            for n in call.numbers
            if isinstance(n, float | bool | str | type(None))
        )
        graded = not a.modes.grad or (call.modes or a.modes).grad  # without gradients around it, none can be cut
        steps.append((call.op, call.place, tuple(map(place, call.inputs)), numbers, graded, _whole_numbers(call), call))
    return [*steps, (*map(place, ends), (), a.end.call)]


def _whole_numbers(call: Recorded) -> tuple[int, ...]:
    leaves = tree_leaves([[n.start, n.stop, n.step] if isinstance(n, slice) else n for n in call.numbers])
    return tuple(n for n in leaves if type(n) is int)


def same_shapes(proved: tuple[Recording, ...], recording: Recording, sizes: Sizes) -> None:
    """**Raises** `RefusedError` where a call of another size makes what does not follow from those of a proof."""
    same_structure(proved[0], recording)
    of = [Sizes(*one.x.shape[:2]) for one in proved] + [sizes]
    all_calls = [r.before(r.y) for r in (*proved, recording)]
    kept = [[call for call in calls if call.op not in _CASTS] for calls in all_calls]
    for calls in zip(*kept, strict=True):
        for a, b, c in zip(*(call.values for call in calls), strict=True):
            if a.data.dim() != c.data.dim() or not all(map(_follows, a.shape, b.shape, c.shape, [of] * c.data.dim())):
                raise RefusedError(f"makes {list(c.shape)}, which does not grow as it did in the proof", calls[-1])
        if not all(_number_follows(numbers, of) for numbers in zip(*map(_whole_numbers, calls), strict=True)):
            raise RefusedError("takes a number that does not grow as it did in the proof", calls[-1])


def _follows(a: int, b: int, c: int, of: list[Sizes]) -> bool:
    """Whether a size is a multiple of 1, B, T, T + 1 (keys and a sink) or B·T at all three shapes, or T less a few."""
    less = {s.tokens - n for s, n in zip(of, (a, b, c), strict=True)}
    return (len(less) == 1 and 0 < min(less) <= MOST_FIRST) or _grows((a, b, c), of)


def _number_follows(numbers: tuple[int, ...], of: list[Sizes]) -> bool:
    """Whether a whole number is the same at all shapes, goes with B or T as a size does, or differs by T from one."""
    beyond, short = ({n + sign * s.tokens for n, s in zip(numbers, of, strict=True)} for sign in (-1, 1))
    return len(set(numbers)) == 1 or len(beyond) == 1 or len(short) == 1 or _grows(numbers, of)


def _grows(numbers: tuple[int, ...], of: list[Sizes]) -> bool:
    ways = zip(*((1, s.batch, s.tokens, s.tokens + 1, s.batch * s.tokens) for s in of), strict=True)
    return any(all(n * way[0] == numbers[0] * w for n, w in zip(numbers, way, strict=True)) for way in ways)
