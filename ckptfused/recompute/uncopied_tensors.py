"""The parameters of many modules, and their large buffers that no forward writes, looked at together."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.recompute.tracked_tensors import STATISTICS, TrackedTensor, all_left_alone, is_left_alone

_bytes = operator.attrgetter("nbytes")


class UncopiedTensors:
    """The tensors of modules that a forward finds and of which no copy is made, and their versions after it."""

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
        """Takes the large buffers of a module that all forwards so far have left alone, and returns the others."""
        tensors: list[Any] = [*buffers.values()]
        if all_left_alone(tensors) and min(map(_bytes, tensors)) > STATISTICS:
            self._take(module, [*buffers], tensors)
            return []
        found = [(name, t) for name, t in buffers.items() if t is not None]
        left = {name: t for name, t in found if t.nbytes > STATISTICS and is_left_alone(t)}
        self._take(module, [*left], [*left.values()])
        return [(name, t) for name, t in found if name not in left]

    def _take(self, module: nn.Module, names: list[str], tensors: list[Tensor]) -> None:
        if names:
            self._buffers = self._buffers or _Buffers()
            self._buffers.add(module, names, tensors)

    def has_buffers(self) -> bool:
        """Whether there is a buffer, which the forward may write after all."""
        return self._buffers is not None

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
    def __init__(self) -> None:
        self.held: list[tuple[nn.Module, list[str]]] = []
        self.tensors: list[Tensor] = []
        self.versions: list[int | None] = []

    def add(self, module: nn.Module, names: list[str], tensors: list[Tensor]) -> None:
        """Before the forward."""
        self.held.append((module, names))
        self.tensors += tensors
        self.versions += _C.write_counts(tensors)

    def settle(self) -> list[TrackedTensor]:
        now = _C.write_counts(self.tensors)
        if now == self.versions:
            return []
        tracked = self._tracked()
        written = [w for w, count in zip(tracked, now, strict=True) if w.version != count]
        left = [w for w, count in zip(tracked, now, strict=True) if w.version == count]
        self.held, self.tensors, self.versions = [], [], []
        for w in left:
            module, _, name = w.place  # type: ignore[misc]
            self.add(module, [name], [w.tensor])
        for w in written:
            w.settle()
        return written

    def others(self) -> list[TrackedTensor]:
        present = itertools.chain.from_iterable([map(m._buffers.get, names) for m, names in self.held])
        if all(map(operator.is_, present, self.tensors)) and _C.write_counts(self.tensors) == self.versions:
            return []
        return [w for w in self._tracked() if w.changed() or w.replaced()]

    def _tracked(self) -> list[TrackedTensor]:
        places = [(module, "_buffers", name) for module, names in self.held for name in names]
        return [
            TrackedTensor(t, copy=False, place=place, version=version)
            for t, place, version in zip(self.tensors, places, self.versions, strict=True)
        ]
