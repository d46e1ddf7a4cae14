"""The parameters of many modules, and their large buffers that no forward writes, looked at together."""

from __future__ import annotations

import itertools
import operator

from torch import Tensor, nn

from ckptfused.recompute.copy_on_write import write_count
from ckptfused.recompute.tracked_tensors import STATISTICS, TrackedTensor, is_left_alone


class UncopiedTensors:
    """The tensors of modules that a forward finds and of which no copy is made, and their versions after it."""

    def __init__(self) -> None:
        # Flat, for the garbage collector goes through all lists and dicts that a graph holds.
        self._modules: list[nn.Module] = []
        self._counts: list[int] = []
        self._names: list[str] = []
        self._tensors: list[Tensor | None] = []
        self._versions: list[int | None] = []
        self._buffers = _Buffers()

    def add(self, module: nn.Module, parameters: dict[str, Tensor | None]) -> None:
        """Takes a module's parameters."""
        self._modules.append(module)
        self._counts.append(len(parameters))
        self._names += parameters.keys()
        self._tensors += parameters.values()

    def take_buffers(self, module: nn.Module, buffers: dict[str, Tensor | None]) -> list[tuple[str, Tensor]]:
        """Takes the large buffers of a module that all forwards so far have left alone, and returns the others."""
        left = {
            name: t
            for name, t in buffers.items()
            if t is not None and t.nbytes > STATISTICS and is_left_alone(t) and not t.requires_grad
        }
        self._buffers.add(module, left)
        return [(name, t) for name, t in buffers.items() if t is not None and name not in left]

    def has_buffers(self) -> bool:
        """Whether there is a buffer, which the forward may write after all."""
        return bool(self._buffers.tensors)

    def settle(self) -> list[TrackedTensor]:
        """Before the forward, and after it: returns the buffers that it wrote. A parameter that it writes (a lazy one's
        first values, a forced norm) is written again by the replay."""
        self._versions = _versions(self._tensors)
        return self._buffers.settle()

    def others(self) -> list[TrackedTensor]:
        """The tensors that were changed since, or replaced."""
        present = itertools.chain.from_iterable([m._parameters.values() for m in self._modules])
        same = all(map(operator.is_, itertools.chain(present, (self,)), [*self._tensors, self]))
        if same and _versions(self._tensors) == self._versions:
            return self._buffers.others()
        modules = itertools.chain.from_iterable(map(itertools.repeat, self._modules, self._counts))
        places = zip(modules, itertools.repeat("_parameters"), self._names)
        tracked = [
            TrackedTensor(t, copy=False, place=place, version=expected)
            for t, place, expected in zip(self._tensors, places, self._versions, strict=True)
            if t is not None
        ]
        return [w for w in tracked if w.changed() or w.replaced()] + self._buffers.others()


class _Buffers:
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []

    def add(self, module: nn.Module, buffers: dict[str, Tensor]) -> None:
        self.modules += [module] * len(buffers)
        self.names += buffers
        self.tensors += buffers.values()

    def settle(self) -> list[TrackedTensor]:
        now = [t._version for t in self.tensors]
        before, self.versions = self.versions or now, now
        if before == now:
            return []
        written = [i for i, expected in enumerate(before) if now[i] != expected]
        tracked = [self._tracked(i, before[i]) for i in written]
        for i in reversed(written):
            for held in (self.modules, self.names, self.tensors, self.versions):
                del held[i]  # type: ignore[attr-defined]
        for w in tracked:
            w.settle()
        return tracked

    def others(self) -> list[TrackedTensor]:
        looked_at = zip(self.modules, self.names, self.tensors, self.versions, strict=True)
        different = [m._buffers.get(name) is not t or t._version != expected for m, name, t, expected in looked_at]
        tracked = [self._tracked(i, self.versions[i]) for i, differs in enumerate(different) if differs]
        return [w for w in tracked if w.changed() or w.replaced()]

    def _tracked(self, i: int, version: int) -> TrackedTensor:
        place = self.modules[i], "_buffers", self.names[i]
        return TrackedTensor(self.tensors[i], copy=False, place=place, version=version)


def _versions(tensors: list[Tensor | None]) -> list[int | None]:
    try:
        return [None if t is None else t._version for t in tensors]
    except RuntimeError:  # made in inference mode
        return [None if t is None else write_count(t) for t in tensors]
