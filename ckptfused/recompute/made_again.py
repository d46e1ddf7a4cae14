"""Saved tensors that backward has made again, by the operations that made them, from what is there anyway."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ckptfused._extension import _C
from ckptfused.checks import has_values
from ckptfused.compat.torch_autograd import (
    graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from ckptfused.compat.torch_dispatch import below_autograd
from ckptfused.ops import numerics
from ckptfused.recompute.copy_on_write import write_count
from ckptfused.recompute.held import Held, check_unchanged
from ckptfused.recompute.operations import Made, Operations, Read


class _Here(threading.local):
    operations: Operations | None = None
    """What records operations in this thread."""


_here = _Here()


def is_recorded() -> bool:
    """Whether what is called now may be made again."""
    return _here.operations is not None and not _here.operations.apart


@contextmanager
def not_recorded() -> Iterator[None]:
    """A context whose results are saved rather than made again: a checkpoint of their own makes them, say."""
    recorded = _here.operations
    if recorded is None or recorded.apart:
        yield
        return
    recorded.apart = True
    try:
        yield
    finally:
        recorded.apart = False


class _Kept:
    """A tensor as the hooks around the call have it, or as it is."""

    def __init__(self, t: Tensor, hooks: Any) -> None:
        self._unpack = None if hooks is None else hooks[1]
        self._packed = Held(t) if hooks is None else hooks[0](t)

    def take(self) -> Tensor:
        return self._packed.take() if self._unpack is None else self._unpack(self._packed)  # type: ignore[no-any-return]


class _Saved:
    """What autograd holds in the place of a tensor: that tensor, until it is settled whether it can be made again."""

    __slots__ = ("_counters", "_kind", "_source", "_versions", "after", "made", "t")

    def __init__(self, t: Tensor, place: tuple[Made, tuple[int, ...]] | None) -> None:
        self.t: Tensor | None = t
        self.made: Made | None = None
        self.after: tuple[int, ...] = ()
        if place is not None:
            self.made, self.after = place
        self._source: Any = None
        self._kind = t.dtype, t.shape
        self._counters = _C.VersionCounters([t])
        self._versions = self._counters.now()

    def settle(self, source: Any) -> None:
        """source: a `_Kept`, or the `MadeAgain` that makes it."""
        self.t, self._source = None, source

    def take(self) -> Tensor:
        """The tensor. **Raises** `RuntimeError` if it was changed in place since it was saved."""
        now = self._counters.now()
        if now != self._versions:
            dtype, shape = self._kind
            check_unchanged(f"[{dtype} {list(shape)}]", *now, *self._versions)
        if self.t is not None:
            return self.t
        return self._source.make(self.made, self.after) if self.made is not None else self._source.take()  # type: ignore[no-any-return]


class _Values:
    """What one backward has made, each until the last that reads it has it."""

    def __init__(self, task: int, readers: Counter[int]) -> None:
        self.task = task
        self.made: dict[int, list[Tensor]] = {}
        self.done: set[int] = set()
        self._left = readers.copy()
        """How many still ask for what an operation made."""

    def of(self, made: Made) -> Tensor:
        """A result."""
        return self.made[made.operation][made.output]

    def lacks(self, operations: Iterable[int]) -> bool:
        """Whether what one of these made is gone: everything has to be made once more."""
        return any(number in self.done and number not in self.made for number in operations)

    def release(self, operations: Iterable[int]) -> None:
        """One that needed these operations has what they made."""
        for number in operations:
            self._left[number] -= 1
            if self._left[number] <= 0:
                self.made.pop(number, None)


class MadeAgain:
    """Calls of which autograd saves nothing that can be made again.

    Within `at_work`, operations are recorded, and what autograd saves is noted. `settle` then lets go of what recorded
    operations made of tensors that are there anyway: parameters, arguments, random states, what cannot be repeated (a
    draw, an op that is none of PyTorch's). These alone are **saved**, by the hooks around the call, if there are any.
    Backward **recomputes** the operations that it needs, each once, without any code of the call, and **raises** as
    PyTorch does for what was changed in place.
    """

    def __init__(self) -> None:
        self._hooks = saved_tensor_hooks()
        self._operations = Operations()
        self._settings = numerics.current()
        self._pending: list[_Saved] = []
        self._kept: dict[int, _Kept] = {}
        self._readers: Counter[int] = Counter()
        """How many operations and saved tensors ask for the results of an operation that is made again."""
        self._values: _Values | None = None
        self._lock = threading.RLock()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A context whose operations are recorded, and what autograd saves in it is for `settle`."""
        push_saved_tensor_hooks(self._pack, _take)
        around, _here.operations = _here.operations, self._operations
        try:
            with self._operations:
                yield
        finally:
            _here.operations = around
            pop_saved_tensor_hooks()

    def makes(self, t: Tensor) -> bool:
        """Whether t would be made again."""
        return self._operations.place(t) is not None

    def _pack(self, t: Tensor) -> _Saved | Held:
        place = self._operations.place(t)
        if place is None and self._hooks is None and t.is_leaf and t.requires_grad:
            return Held(t)
        saved = _Saved(t, place)
        self._pending.append(saved)
        return saved

    def settle(self, proved: set[Any] | None = None) -> None:
        """Saves what cannot be made again, lets go of the rest.

        proved: the kinds of calls, operation by operation, of which it was seen that they make the same again; others
        are tried, and saved as they are where they do not (a kernel that PyTorch does not see may have written
        something).
        """
        pending, self._pending = self._pending, []
        lost = self._lost()
        again = [saved for saved in pending if saved.made is not None and lost.isdisjoint(saved.after)]
        if proved is not None and not self._is_proved(again, proved):
            again = []
        self._need({number for saved in again for number in saved.after})
        for saved in again:
            self._readers.update(saved.after)
            saved.settle(self)
        for saved in pending:
            if saved.t is not None:
                number = self._operations.number(saved.t)
                kept = None if number is None else self._kept.get(number)
                saved.made = None
                saved.settle(_Kept(saved.t, self._hooks) if kept is None else kept)

    def end(self) -> None:
        """After the last `settle`: lets go of operations that nobody needs."""
        recorded = self._operations.recorded
        for number in range(len(recorded)):
            if number not in self._readers:
                recorded[number] = None  # type: ignore[call-overload]
        self._operations.end()

    def _closure(self, wanted: Iterable[int], done: Container[int]) -> list[int]:
        """The operations that have to be made for these, in order."""
        found: set[int] = set()
        queue, recorded, needed = [*wanted], self._operations.recorded, self._readers
        while queue:
            number = queue.pop()
            if number not in found and number not in done:
                found.add(number)
                queue += recorded[number].after
                queue += (n for n in recorded[number].last if n in needed)
        return sorted(found)

    def _lost(self) -> set[int]:
        """The operations that read what has been changed since, and those that read what these made."""
        changed = {n for n, (t, version) in enumerate(self._operations.read) if write_count(t) != version}
        lost: set[int] = set()
        if changed:
            for number, operation in enumerate(self._operations.recorded):
                if operation.reads & changed or operation.after & lost:
                    lost.add(number)
        return lost

    def _need(self, after: Iterable[int]) -> None:
        for number in self._closure(after, self._readers):
            operation = self._operations.recorded[number]
            self._readers.update(operation.after)
            self._readers[number] += 0
            for n in operation.reads - self._kept.keys():
                self._kept[n] = _Kept(self._operations.read[n][0], self._hooks)

    def _is_proved(self, again: list[_Saved], proved: set[Any]) -> bool:
        own = self._operations.own
        wanted = {number for saved in again for number in saved.after}
        kind = tuple(self._operations.recorded[number].function for number in self._closure(wanted, own))
        if kind in proved or not all(saved.t is None or has_values(saved.t) for saved in again):
            return True
        values = _Values(-1, Counter())
        values.made, values.done = {number: [y] for number, y in own.items()}, {*own}
        kept = {n: read[0] for n, read in enumerate(self._operations.read)}
        self._run(values, wanted, kept.__getitem__)
        seen = [saved for saved in again if saved.made is not None and saved.made.operation not in own]
        if all(_same_bits(saved.t, values.of(saved.made)) for saved in seen):  # type: ignore[arg-type]
            proved.add(kind)
            return True
        return False

    def make(self, made: Made, after: tuple[int, ...]) -> Tensor:
        """What was made there and saved when these operations were over, made again for this backward: what comes later
        in it finds what was made on the way.
        """
        with self._lock:
            task, values = graph_task(), self._values
            if values is None or task == -1 or values.task != task or values.lacks(after):
                values = _Values(task, self._readers)
            self._values = None if task == -1 else values
            if any(number not in values.made for number in after):
                self._run(values, after, lambda number: self._kept[number].take(), values.release)
            t = values.of(made)
            values.release(after)
            return t

    def _run(
        self,
        values: _Values,
        wanted: Iterable[int],
        kept: Callable[[int], Tensor],
        release: Callable[[Iterable[int]], None] = lambda _: None,
    ) -> None:
        def given(reference: Made | Read) -> Tensor:
            return values.of(reference) if isinstance(reference, Made) else kept(reference.number)

        todo = self._closure(wanted, values.done)
        with below_autograd(), _without_autocast(), numerics.under(self._settings):
            for number in todo:
                operation = self._operations.recorded[number]
                values.made[number] = operation(given)
                values.done.add(number)
                release(operation.after)


def _take(saved: _Saved | Held) -> Tensor:
    return saved.take()


def _without_autocast() -> AbstractContextManager[Any]:
    """Casts were recorded as operations."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    context = ExitStack()
    for kind in kinds:
        context.enter_context(torch.autocast(kind, enabled=False))
    return context


def _same_bits(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
