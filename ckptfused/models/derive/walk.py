"""Walking back through a recording: what each rule shares, and which call belongs to which rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ckptfused.models.derive.recording.draws import DRAWS
from ckptfused.models.derive.recording.evaluate import calls_behind, evaluated
from ckptfused.models.derive.recording.names import words_of
from ckptfused.models.derive.recording.record import Recording
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value

TOLERANCE = 1e-9
"""Relative error of float64 values that are to be the same: constants such as GELU's are written with ten digits."""
LAYOUT = words_of(
    "view reshape flatten unflatten transpose permute unsqueeze squeeze expand getitem chunk split narrow unbind",
    "t T mT swapaxes swapdims movedim select expand_as view_as tensor_split split_with_sizes broadcast_to",
    "repeat_interleave repeat reshape_as",
)
"""Calls that only arrange values; each must be right by the numbers that come out at its end."""


_LIKE = ("expand_as", "view_as", "reshape_as")


def arranges(v: Value) -> bool:
    """Whether a value is another one arranged anew, by numbers alone: not picked by an index tensor."""
    return v.call is not None and v.op in LAYOUT and (len(v.call.inputs) == 1 or v.op in _LIKE)


_CUTS = words_of("chunk split split_with_sizes tensor_split narrow getitem")
CASTS = ("to", "float", "double", "type", "type_as", "half", "bfloat16")
_SAME = (*CASTS, "contiguous", "clone", "dropout")


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two float64 tensors are the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not finite.all():
        if not torch.equal(a[~finite], b[~finite]):
            return False
        a, b = a[finite], b[finite]
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) if a.numel() else True


def ratio(before: Tensor, after: Tensor, said: Iterable[Any] = ()) -> float | None:
    """The number that makes one tensor of another, without its rounding; None where there is none. said: numbers in
    the code, by one of which it may multiply or divide.
    """
    by = float((before * after).sum() / before.square().sum())
    short = (float(f"{by:.{digits}g}") for digits in (6, 9, 12))
    numbers = [float(n) for n in said if type(n) in (int, float) and n]
    by = next((n for n in (*short, *numbers, *(1 / n for n in numbers)) if abs(n - by) < 1e-13 * abs(by)), by)
    return by if by and close(before * by, after) else None


def spread(like: Tensor, low: float, high: float) -> Tensor:
    """Numbers from low to high, as many as a tensor has."""
    return torch.linspace(low, high, like.numel(), dtype=like.dtype)


class Walk:
    """A recording, and the calls that a rule has taken so far."""

    def __init__(self, recording: Recording, product: Value | None = None) -> None:
        """product: one whose parts, column by column, are products of their own."""
        self.recording, self.product = recording, product
        self.taken: dict[Recorded, str] = {}
        self._drawn = recording.drawn()
        self._outer: dict[Value, bool] = {}
        self._apart: dict[Value, bool] = {}
        self._first: dict[Value, Value] = {}
        self._made: dict[Hashable, Value] = {}

    @property
    def batch(self) -> int:
        return self.recording.x.shape[0]

    def first(self, v: Value) -> Value:
        """The first value that the same calls make of the same: q and k may each be turned by tables of their own."""
        if v not in self._first:
            call, found = v.call, v
            if call is not None and call.mask is None and call.op not in DRAWS:
                inputs = tuple(map(self.first, call.inputs))
                key = (call.op, call.place, inputs, tuple(map(repr, call.numbers)), tuple(call.kwargs), v.index)
                found = self._made.setdefault(key, v)
            self._first[v] = found
        return self._first[v]

    def agrees(self, v: Value, of: list[Value], function: Callable[..., Tensor], probes: Iterable[Tensor]) -> bool:
        """Whether a value is a function of others, as they are and with each of these in the place of the first."""
        first, *rest = (one.data for one in of)
        if not close(function(first, *rest), v.data):
            return False
        others = self._beside(v, of)
        for probe in probes:
            known = others | dict(zip(of, (given := [probe.view(first.shape), *rest]), strict=True))
            if not close(function(*given), evaluated(v, self.recording.roots.__getitem__, v.data.device, known)):
                return False
        return True

    def _beside(self, v: Value, of: list[Value]) -> dict[Value, Tensor]:
        """What is behind a value that is no function of others, and all that was drawn, as it was."""
        found, moved = dict(self._drawn), {*of}
        for call in calls_behind([v], moved):
            if moved.isdisjoint(call.inputs):
                found.update((made, made.data) for made in call.values)
            else:
                moved.update(call.values)
        return found

    def take_before(self, rule: str, *ends: Value) -> None:
        """Notes that all on which values depend belongs to a rule, where it belongs to none."""
        for call in self.recording.before(*ends):
            self.taken.setdefault(call, rule)

    def take(self, call: Recorded | None, rule: str) -> None:
        """Notes that a call belongs to a rule. **Raises** `RefusedError` where it belongs to another one."""
        if call is not None and self.taken.setdefault(call, rule) != rule:
            raise RefusedError(f"{call.op} is read as {self.taken[call]} and as {rule}", call)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A context after which nothing is taken that was not before, if it raises."""
        before = dict(self.taken)
        try:
            yield
        except RefusedError:
            self.taken = before
            raise

    def attempt(self, rule: Callable[..., Any], *args: Any) -> Any:
        """What a rule reads, None where it does not apply."""
        try:
            with self.trial():
                return rule(*args)
        except RefusedError:
            return None

    def glance(self, rule: Callable[..., Any], *args: Any) -> Any:
        """What a rule reads, of which nothing is taken; None where it does not apply."""
        before = dict(self.taken)
        found = self.attempt(rule, *args)
        self.taken = before
        return found

    def same(self, v: Value) -> Value:
        """The value before casts, copies and dropouts that do nothing."""
        while v is not self.recording.x and v.call is not None and v.op in _SAME and v.call.mask is None:
            before = v.call.inputs[0]
            if before.data.dtype != v.data.dtype or before.shape != v.shape or not _equal(before.data, v.data):
                break
            self.take(v.call, "a cast or copy")
            v = before
        return v

    def part(self, v: Value) -> tuple[int, int] | None:
        """The first and the number of the columns of `product` that a value is; None where it is no such part."""
        if self.product is None or v.call is None or not arranges(v) or v.call.inputs[0] is not self.product:
            return None
        whole = self.product.data
        at = int(v.data.storage_offset() - whole.storage_offset())
        is_one = v.data.stride() == whole.stride() and v.shape[:-1] == whole.shape[:-1]
        return (at, v.shape[-1]) if is_one and v.shape != whole.shape else None

    def through(self, v: Value, layout: str = "layout") -> Value:
        """The value before what only arranges it."""
        v = self.same(v)
        while v is not self.recording.x and v.call is not None and arranges(v) and self.part(v) is None:
            self.take(v.call, layout)
            v = self.same(v.call.inputs[0])
        return v

    def parameter(self, v: Any) -> str:
        """The name of a parameter that a call was given; "" where it is none."""
        return self.same(v).name.removeprefix("param:") if isinstance(v, Value) and self.same(v).is_param else ""

    def bias(self, v: Value) -> str:
        """The name of a vector among the parameters that a value is, or is broadcast from; "" where it is none."""
        if (v := self.same(v)).op in ("expand", "expand_as"):
            v = self.same(v.call.inputs[0])  # type: ignore[union-attr]
        return self.parameter(v) if v.data.dim() == 1 else ""

    def outer(self, v: Value) -> bool:
        """Whether a value depends on no parameter and not on x: a mask, a table."""
        return self._of(v, self._outer, lambda root: root is not self.recording.x and not root.is_param)

    def drawn(self, v: Value) -> bool:
        """Whether a value depends on numbers that the layer draws, which are others at each call."""
        return any(call.op in DRAWS for call in self.recording.before(v))

    def vector_of_samples(self, v: Value) -> bool:
        """Whether a value is a vector for each batch element, or one for all, which does not depend on x: [B, 1, C]; or
        one number for each, [B, 1, 1].
        """
        batch, _, width = self.recording.x.shape
        return tuple(v.shape) in ((batch, 1, width), (1, 1, width), (batch, 1, 1)) and self.apart(v)

    def apart(self, v: Value) -> bool:
        """Whether a value does not depend on x; it may depend on numbers that the layer draws (stochastic depth)."""
        return self._of(v, self._apart, lambda root: root is not self.recording.x)

    def _of(self, v: Value, known: dict[Value, bool], allowed: Callable[[Value], bool]) -> bool:
        """Whether a value depends on no dropout, and on such values alone."""
        if v not in known:
            if v is self.recording.x:
                known[v] = False
            elif v.call is None:
                known[v] = allowed(v)
            else:
                known[v] = v.call.mask is None and all(self._of(i, known, allowed) for i in v.call.inputs)
        return known[v]


def products_in_parts(recording: Recording) -> Iterator[Value]:
    """Products that are taken apart column by column."""
    calls = recording.before(recording.y)
    cut = {call.inputs[0] for call in calls if call.op in _CUTS and call.inputs}
    return (v for call in calls if call.op in ("linear", "addmm", "matmul") for v in call.values if v in cut)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(((a == b) | (a != a)).all())
