"""What modules and arguments hold that a forward may change, as it is now."""

from __future__ import annotations

import enum
import functools
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.torch_distributed import is_flat_view, is_managed
from ckptfused.recompute.tracked_tensors import STATISTICS, TrackedTensor, is_left_alone
from ckptfused.state.bindings import SlotAttributes
from ckptfused.state.containers import (
    CONTAINERS,
    SHOWN,
    Attributes,
    ClassAttributes,
    Contents,
    without_graph,
)
from ckptfused.state.generators import is_generator
from ckptfused.state.reach import DEPTH, MOST_REACHED, WIDTH, of_torch, slots_of


class _Kind(enum.Enum):
    OTHER, CONTAINER, TUPLE, TENSOR, MODULE, GENERATOR = range(6)


class _Kinds(dict[type, _Kind]):
    def __missing__(self, kind: type) -> _Kind:
        pairs: tuple[tuple[Any, _Kind], ...] = (
            (CONTAINERS, _Kind.CONTAINER),
            ((tuple, frozenset), _Kind.TUPLE),
            (Tensor, _Kind.TENSOR),
            (nn.Module, _Kind.MODULE),
        )
        found = next((name for bases, name in pairs if issubclass(kind, bases)), _Kind.OTHER)
        self[kind] = found = _Kind.GENERATOR if is_generator(kind) else found
        return found


_kinds = _Kinds()
_OTHER, _CONTAINER, _TENSOR = _Kind.OTHER, _Kind.CONTAINER, _Kind.TENSOR
_DICTS = (*SHOWN, "_modules")


class AttributeScan:
    """Collects holders, tensors and generators from what it is shown."""

    def __init__(self) -> None:
        self.holders: list[Any] = []
        self.tensors: list[TrackedTensor] = []
        self.generators: list[Any] = []
        self.hidden: list[nn.Module] = []
        """Modules in containers that modules hold."""
        self._empty: list[Any] = []
        self._seen: set[int] = set()
        self._classes: dict[type, None] = {}

    def attributes(self, held: dict[str, Any]) -> None:
        """Notes the attributes of a module, or of an object among the arguments."""
        found = held.copy()
        names, others = _looked_at(tuple(found), tuple(map(type, found.values())))
        containers: list[Any] = [*map(found.get, names)]
        if any(containers):
            for value in filter(None, containers):
                self.look_at(value)
            containers = [value for value in containers if not value]
        self._empty += containers
        for name, kind in others:
            value = found[name]
            if kind is _CONTAINER:
                if not value:
                    self._empty.append(value)
                elif name == "_modules":
                    self.holders.append(Contents(value))
            elif kind is not _TENSOR:
                self.look_at(value)
            elif not (is_managed(held) and is_flat_view(value)):
                found[name] = without_graph(value)
                self.tensors.append(TrackedTensor(found[name], True))
        self.holders.append(Attributes(held, found))

    def instance(self, value: Any) -> None:
        """An object that is no module, its classes with it."""
        self.class_of(value)
        kind: Any = type(value)
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self.attributes(held)
        if slots_of(kind):
            self.holders.append(slots := SlotAttributes(value))
            for inner in slots.found.values():
                self.look_at(inner)

    def class_of(self, holder: Any) -> None:
        """The attributes of a class, or of the classes of a module or an object, and of those above."""
        for base in _own_classes(holder if isinstance(holder, type) else type(holder)):
            if base not in self._classes:
                self._classes[base] = None
                attributes = ClassAttributes(base)
                self.holders.append(attributes)
                for value in attributes.found.values():
                    self.look_at(value)

    def changed_since(self) -> list[Any]:
        """The holders, with those that were empty and are no longer."""
        if not any(self._empty):
            return self.holders
        return [*self.holders, *(Contents(held, {} if isinstance(held, dict) else []) for held in self._empty if held)]

    def look_at(self, value: Any, depth: int = 1) -> None:
        """A value that is held by what was shown: in containers, as far as there are containers in it."""
        kind = _kinds[type(value)]
        if kind is _OTHER:
            return
        if kind is _TENSOR:
            self.tensors.append(
                TrackedTensor(without_graph(value), value.nbytes <= STATISTICS or not is_left_alone(value))
            )
        elif kind is _Kind.MODULE:
            self.hidden.append(value)
        elif kind is _Kind.GENERATOR:
            self.generators.append(value)
        elif id(value) not in self._seen and len(self._seen) < MOST_REACHED:
            self._seen.add(id(value))
            if kind is _CONTAINER:
                self.holders.append(Contents(value))
            if depth < DEPTH and len(value) <= WIDTH:
                for inner in list(value.values() if isinstance(value, dict) else value):
                    self.look_at(inner, depth + 1)


@functools.lru_cache(maxsize=4096)
def _looked_at(names: tuple[str, ...], types: tuple[type, ...]) -> tuple[tuple[str, ...], list[tuple[str, _Kind]]]:
    """Which of an object's attributes are containers but a module's own dicts, and the others to look at."""
    kinds = [(name, _kinds[kind]) for name, kind in zip(names, types, strict=True) if _kinds[kind] is not _OTHER]
    containers = tuple(name for name, kind in kinds if kind is _CONTAINER and name not in _DICTS)
    return containers, [(name, kind) for name, kind in kinds if name not in containers]


# Who has something of these shares it with other threads, which change it while a replay lasts.
_CONCURRENT = ("_thread", "threading", "queue", "asyncio", "multiprocessing", "concurrent", "logging", "socket")


def is_shared(value: Any) -> bool:
    """Whether an object is, or holds, a lock, a queue or a thread."""
    held = getattr(value, "__dict__", None)
    return any(map(_is_concurrent, {type(value), *map(type, held.values() if type(held) is dict else ())}))


@functools.lru_cache(maxsize=4096)
def _is_concurrent(kind: Any) -> bool:
    return any(base.__module__.partition(".")[0] in _CONCURRENT for base in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def _own_classes(kind: Any) -> tuple[type, ...]:
    """The classes above an object that are not Python's or PyTorch's."""
    return tuple(base for base in kind.__mro__ if base.__module__ != "builtins" and not of_torch(base))
