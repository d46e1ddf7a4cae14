"""The parameters of many modules, looked at together."""

from __future__ import annotations

import itertools
import operator

from torch import Tensor, nn

from ckptfused.recompute.copy_on_write import version
from ckptfused.recompute.tracked_tensors import TrackedTensor


class Parameters:
    """The parameters that a forward finds, and their versions after it."""

    def __init__(self) -> None:
        # Flat, for the garbage collector goes through all lists and dicts that a graph holds.
        self._modules: list[nn.Module] = []
        self._counts: list[int] = []
        self._names: list[str] = []
        self._tensors: list[Tensor | None] = []
        self._versions: list[int | None] = []

    def add(self, module: nn.Module, parameters: dict[str, Tensor | None]) -> None:
        """Takes a module's."""
        self._modules.append(module)
        self._counts.append(len(parameters))
        self._names += parameters.keys()
        self._tensors += parameters.values()

    def settle(self) -> None:
        """Before the forward, and after it: one that it writes (a lazy one's first values, a forced norm) is written
        again by the replay."""
        self._versions = _versions(self._tensors)

    def others(self) -> list[TrackedTensor]:
        """The parameters that were changed since, or replaced."""
        present = itertools.chain.from_iterable([m._parameters.values() for m in self._modules])
        same = all(map(operator.is_, itertools.chain(present, (self,)), [*self._tensors, self]))
        if same and _versions(self._tensors) == self._versions:
            return []
        modules = itertools.chain.from_iterable(map(itertools.repeat, self._modules, self._counts))
        places = zip(modules, itertools.repeat("_parameters"), self._names)
        tracked = [
            TrackedTensor(t, copy=False, place=place, version=expected)
            for t, place, expected in zip(self._tensors, places, self._versions, strict=True)
            if t is not None
        ]
        return [w for w in tracked if w.changed() or w.replaced()]


def _versions(tensors: list[Tensor | None]) -> list[int | None]:
    try:
        return [None if t is None else t._version for t in tensors]
    except RuntimeError:  # made in inference mode
        return [None if t is None else version(t) for t in tensors]
