"""The parameters of many modules, their small buffers and those that no forward writes, looked at together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.recompute.copy_on_write import unseen_by_modes
from ckptfused.recompute.tracked_tensors import (
    STATISTICS,
    TrackedTensor,
    all_left_alone,
    byte_count,
    has_statistics,
    is_left_alone,
)

_bytes = operator.attrgetter("nbytes")


class UncopiedTensors:
    """The tensors of modules that a forward finds and of which no copies of their own are made, and their versions."""

    def __init__(self) -> None:
        # Flat, for the garbage collector goes through all lists and dicts that a graph holds.
        self._modules: list[nn.Module] = []
        self._counts: list[int] = []
        self._names: list[str] = []
        self._tensors: list[Tensor | None] = []
        self._versions: list[int | None] | None = None  # until the forward is over
        self._buffers: _Buffers | None = None
        self.absent: list[tuple[nn.Module, str]] = []
        """Modules and names of buffers that are None."""

    def add(self, module: nn.Module, parameters: dict[str, Tensor | None]) -> None:
        """Takes a module's parameters."""
        self._modules.append(module)
        self._counts.append(len(parameters))
        self._names += parameters
        self._tensors += parameters.values()

    def take_buffers(self, module: nn.Module, buffers: dict[str, Tensor | None]) -> list[tuple[str, Tensor]]:
        """Takes the small buffers of a module, and the large ones that all forwards so far have left alone; returns
        the others.
        """
        tensors: list[Any] = [*buffers.values()]
        small = _C.all_small(tensors, STATISTICS)
        if small or (all_left_alone(tensors) and not has_statistics(module) and min(map(_bytes, tensors)) > STATISTICS):
            self._take(module, [*buffers], tensors, small)
            return []
        self.absent += [(module, name) for name, t in buffers.items() if t is None]
        found = [(name, t) for name, t in buffers.items() if t is not None]
        taken = {name: t for name, t in found if _is_taken(module, t)}
        self._take(module, [*taken], [*taken.values()], _C.all_small([*taken.values()], STATISTICS))
        return [(name, t) for name, t in found if name not in taken]

    def _take(self, module: nn.Module, names: list[str], tensors: list[Tensor], small: bool) -> None:
        if names:
            self._buffers = self._buffers or _Buffers()
            self._buffers.add(module, names, tensors, small)

    def begin(self) -> None:
        """Before the forward."""
        if self._buffers is not None:
            self._buffers.begin()

    def may_be_written(self) -> bool:
        """Whether there is a large buffer, which the forward may write after all."""
        return self._buffers is not None and self._buffers.any_large

    def settle(self) -> list[TrackedTensor]:
        """After the forward: returns the buffers that it wrote. A parameter that it writes (a lazy one's first values,
        a forced norm) is written again by the replay."""
        self._versions = _C.write_counts(self._tensors)
        return self.written()

    def written(self) -> list[TrackedTensor]:
        """The buffers that the forward wrote so far, of which no call told before."""
        return [] if self._buffers is None else self._buffers.written()

    def others(self) -> list[TrackedTensor]:
        """The tensors that were changed since, or replaced."""
        buffers = [] if self._buffers is None else self._buffers.others()
        if not self._tensors or self._versions is None:
            return buffers
        present = itertools.chain.from_iterable([m._parameters.values() for m in self._modules])
        same = all(map(operator.is_, itertools.chain(present, (self,)), [*self._tensors, self]))
        if same and _C.write_counts(self._tensors) == self._versions:
            return buffers
        modules = itertools.chain.from_iterable(map(itertools.repeat, self._modules, self._counts))
        places = zip(modules, itertools.repeat("_parameters"), self._names)
        tracked = [
            TrackedTensor(t, copy=False, place=place, version=expected)
            for t, place, expected in zip(self._tensors, places, self._versions, strict=True)
            if t is not None
        ]
        return [w for w in tracked if w.changed() or w.replaced()] + buffers


def _is_taken(module: nn.Module, t: Tensor) -> bool:
    """Whether one call copies and compares it with others, or looks at its version alone."""
    if byte_count(t) <= STATISTICS:
        return _C.all_small([t], STATISTICS)
    return is_left_alone(t) and not has_statistics(module)


class _Buffers:
    """Small ones are copied to one memory, and compared in one call."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.any_large = False

    def add(self, module: nn.Module, names: list[str], tensors: list[Tensor], small: bool) -> None:
        self.modules += itertools.repeat(module, len(names))
        self.names += names
        self.tensors += tensors
        self.any_large = self.any_large or not small

    def begin(self) -> None:
        self.versions = _C.write_counts(self.tensors)
        self.copies = _C.ByteCopies(self.tensors, STATISTICS)
        self.left: Sequence[int] = range(len(self.tensors))

    def written(self) -> list[TrackedTensor]:
        written = self._changed()
        if written:
            self.left = [i for i in self.left if i not in written]
        return [self._tracked(i).is_written() for i in sorted(written)]

    def others(self) -> list[TrackedTensor]:
        changed = self._changed()
        tracked = [
            self._tracked(i)
            for i in self.left
            if i in changed or self.modules[i]._buffers.get(self.names[i]) is not self.tensors[i]
        ]
        return [w for w in tracked if w.changed() or w.replaced()]

    def _changed(self) -> set[int]:
        """Numbers of the buffers left that have other values than at `begin`, or another version where no copy is."""
        changed, now = {*self.copies.differing()}, _C.write_counts(self.tensors)
        if now != self.versions:
            changed.update(itertools.compress(range(len(now)), map(operator.ne, now, self.versions)))
        return changed.intersection(self.left) if changed else changed

    def _tracked(self, i: int) -> TrackedTensor:
        place, t, found = (self.modules[i], "_buffers", self.names[i]), self.tensors[i], self.copies.of(i)
        if found is not None and type(t) is not Tensor:
            with unseen_by_modes():
                found = found.as_subclass(type(t))
        return TrackedTensor(t, False, place, self.versions[i], found)
