"""The parameters of many modules, and their buffers that no forward writes, looked at together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.recompute.tracked_tensors import BYTES, TrackedTensor, are_taken_together, is_taken_with_others

_bytes = operator.attrgetter("nbytes")


class UncopiedTensors:
    """The tensors of modules that a forward finds and of which no copies of their own are made, and their versions."""

    def __init__(self) -> None:
        # Flat, for the garbage collector goes through all lists and dicts that a graph holds.
        self._modules: list[nn.Module] = []
        self._counts: list[int] = []
        self._names: list[str] = []
        self._tensors: list[Tensor | None] = []
        self._versions: list[int | None] = []
        self._buffers: _Buffers | None = None

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
        if are_taken_together(tensors, module.training):
            self._take(module, [*buffers], tensors)
            return []
        found = [(name, t) for name, t in buffers.items() if t is not None]
        taken = {name: t for name, t in found if is_taken_with_others(t, module.training)}
        self._take(module, [*taken], [*taken.values()])
        return [(name, t) for name, t in found if name not in taken]

    def _take(self, module: nn.Module, names: list[str], tensors: list[Tensor]) -> None:
        if names:
            self._buffers = self._buffers or _Buffers()
            self._buffers.add(module, names, tensors)

    def begin(self) -> None:
        """Before the forward."""
        if self._buffers is not None:
            self._buffers.begin()

    def may_be_written(self) -> bool:
        """Whether there is a large buffer, which the forward may write after all."""
        return self._buffers is not None and self._buffers.any_large()

    def settle(self) -> list[TrackedTensor]:
        """After the forward: returns the buffers that it wrote. A parameter that it writes (a lazy one's first values,
        a forced norm) is written again by the replay."""
        self._versions = _C.write_counts(self._tensors)
        return [] if self._buffers is None else self._buffers.settle()

    def others(self) -> list[TrackedTensor]:
        """The tensors that were changed since, or replaced."""
        buffers = [] if self._buffers is None else self._buffers.others()
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


class _Buffers:
    """Small ones are copied to one memory, and compared in one call."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []

    def add(self, module: nn.Module, names: list[str], tensors: list[Tensor]) -> None:
        self.modules += itertools.repeat(module, len(names))
        self.names += names
        self.tensors += tensors

    def begin(self) -> None:
        self.versions = _C.write_counts(self.tensors)
        self.copies = _C.ByteCopies(self.tensors, BYTES)
        self.left: Sequence[int] = range(len(self.tensors))

    def any_large(self) -> bool:
        return any(map(BYTES.__lt__, map(_bytes, self.tensors)))

    def settle(self) -> list[TrackedTensor]:
        written = {*self.copies.differing()}
        now = _C.write_counts(self.tensors)
        if now != self.versions:
            written.update(itertools.compress(self.left, map(operator.ne, now, self.versions)))
        if written:
            self.left = [i for i in self.left if i not in written]
        return [self._tracked(i).is_written() for i in sorted(written)]

    def others(self) -> list[TrackedTensor]:
        now = _C.write_counts(self.tensors)
        return [
            tracked
            for i in self.left
            if now[i] != self.versions[i] or self.modules[i]._buffers.get(self.names[i]) is not self.tensors[i]
            if (tracked := self._tracked(i)).changed() or tracked.replaced()
        ]

    def _tracked(self, i: int) -> TrackedTensor:
        place = (self.modules[i], "_buffers", self.names[i])
        return TrackedTensor(self.tensors[i], False, place, self.versions[i], self.copies.of(i))
