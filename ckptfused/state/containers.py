"""Attributes and containers, with what a forward found in them."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

from torch import Tensor, nn

from ckptfused.compat.torch_distributed import is_flat_view, is_managed

# A module's dicts of tensors, which are watched by name.
SHOWN = ("_parameters", "_buffers")
# Subclasses may mean something else by their methods; what they hold is read and written past them.
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_PLAIN_CONTAINERS = frozenset(CONTAINERS)


class Unseen(NamedTuple):
    """Holds what is looked after otherwise: `reach` finds nothing in it."""

    held: Any


class _Kinds(dict[type, bool]):
    """Whether values are numbers, texts and the like, which no operation changes: by type, of those that were met.
    NumPy's scalars are, its booleans too, whether it is there or not."""

    def __missing__(self, kind: type) -> bool:
        found = kind in (type(None), tuple) or issubclass(kind, (Number, str, bytes, Enum))
        found = found or any((base.__module__, base.__name__) == ("numpy", "generic") for base in kind.__mro__)
        return self.setdefault(kind, found)


_PLAIN = _Kinds()


def content_of(held: Any) -> Any:
    """What a container holds now, for `put_back`: a dict or a list."""
    base = next(base for base in CONTAINERS if isinstance(held, base))
    return dict(base.items(held)) if issubclass(base, dict) else list(base.__iter__(held))


def put_back(held: Any, content: Any) -> Any:
    """Has a container hold that, and returns what it held; touches nothing where these are the same."""
    if type(held) in _PLAIN_CONTAINERS and same_content(held, content):
        return content
    before = content_of(held)
    if same_content(before, content):
        return before
    base = next(base for base in CONTAINERS if isinstance(held, base))
    if not isinstance(content, dict):
        base.clear(held)
        (base.update if base is set else base.extend)(held, content)
        return before
    for key in before.keys() - content.keys():
        base.__delitem__(held, key)
    if [key for key in before if key in content] != [key for key in content if key in before]:
        base.clear(held)
    for key, value in content.items():
        base.__setitem__(held, key, value)
    return before


class Contents:
    """A dict, list, set or deque."""

    __slots__ = ("_held", "found")

    def __init__(self, held: Any, found: Any = None) -> None:
        self._held = held
        self.found = content_of(held) if found is None else found
        _without_graphs(self.found, self.found.items() if isinstance(self.found, dict) else enumerate(self.found))

    def put(self, content: Any) -> Any:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        return put_back(self._held, content)


class Attributes:
    """The attributes of a module, or of another object."""

    __slots__ = ("_held", "found")

    def __init__(self, held: dict[str, Any], found: dict[str, Any]) -> None:
        self._held = held
        self.found = found

    def put(self, content: dict[str, Any]) -> dict[str, Any]:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        held = self._held
        if same_content(held, content):
            return content
        before = held.copy()
        managed = is_managed(before)
        for name in before.keys() | content.keys():
            old, new = before.get(name, _ABSENT), content.get(name, _ABSENT)
            views = managed and (is_flat_view(old) or is_flat_view(new))
            if old is new or views or name in SHOWN or name.startswith("ds_"):  # DeepSpeed keeps its books itself
                continue
            if new is _ABSENT:
                del held[name]
            else:
                held[name] = new
        return before


class ClassAttributes:
    """The data among the attributes of a class: neither methods nor descriptors."""

    __slots__ = ("_all", "_class", "found")

    def __init__(self, of: type) -> None:
        self._class = of
        held = dict(vars(of))
        self.found = _data_of(held)
        # All that the class holds, by which a change is seen sooner; of tensors it would hold the graphs.
        self._all = {} if any(isinstance(value, Tensor) for value in self.found.values()) else held
        _without_graphs(self.found, self.found.items())

    def put(self, content: dict[str, Any]) -> dict[str, Any]:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        now = dict(vars(self._class))
        if content is self.found and same_content(now, self._all):
            return content
        before = _data_of(now)
        if not same_content(before, content):
            for name in before.keys() - content.keys():
                delattr(self._class, name)
            for name, value in content.items():
                if before.get(name, _ABSENT) is not value:
                    setattr(self._class, name, value)
        return before


class Plain:
    """The children of many modules, and those of their attributes that are numbers, texts and the like, or None."""

    __slots__ = ("_children", "_held", "found")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._held = [vars(module) for module in modules]
        self._children = [children for held in self._held if (children := held["_modules"])]
        self.found = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        # Flat, for the garbage collector goes through all lists that a graph holds.
        names = [_known_names.setdefault(known, known) for known in map(tuple, self._held)]
        values = [
            value if _PLAIN[type(value)] else _ABSENT  # by type: a tensor would be held with its graph
            for held in self._held
            for value in held.values()
        ]
        return names, values, [children.copy() for children in self._children]

    def put(self, content: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
        """Has them hold that, and returns what they held."""
        before = self._now()
        same = before[0] == content[0] and all(map(operator.is_, before[1], content[1]))
        if not same:
            values = iter(content[1])
            for held, names in zip(self._held, content[0], strict=True):
                _put_plain(held, dict(zip(names, itertools.islice(values, len(names)), strict=True)))
        for children, wanted in zip(self._children, content[2], strict=True):
            if not same_content(children, wanted):
                children.clear()
                children.update(wanted)
        return before


def _put_plain(held: dict[str, Any], content: dict[str, Any]) -> None:
    for name in held.keys() - content.keys():
        if _PLAIN[type(held[name])] and not name.startswith("ds_"):
            del held[name]
    for name, value in content.items():
        if value is not _ABSENT and held.get(name, _ABSENT) is not value and not name.startswith("ds_"):
            held[name] = value


_ABSENT = object()
_known_names: dict[tuple[str, ...], tuple[str, ...]] = {}
"""By themselves the names of attributes that modules have: modules of one class share them."""


def _data_of(held: dict[str, Any]) -> dict[str, Any]:
    return {name: held[name] for name in _data(tuple(held), tuple(map(type, held.values())))}


@functools.lru_cache(maxsize=4096)
def _data(names: tuple[str, ...], types: tuple[Any, ...]) -> list[str]:
    """The attributes of a class that are neither methods nor descriptors, by their types."""
    return [
        name
        for name, kind in zip(names, types, strict=True)
        if not name.startswith("__") and (_PLAIN[kind] or issubclass(kind, (Tensor, nn.Module, *CONTAINERS)))
    ]


def without_graph(t: Tensor) -> Tensor:
    """t, or its values alone: these are all that a replay needs; a graph would hold the one of the call before, and
    that the next."""
    try:
        return t if t.is_leaf else t.detach().requires_grad_()
    except RuntimeError:  # a view of FSDP1's flat parameters that is out of date
        return t


def _without_graphs(found: Any, items: Iterable[tuple[Any, Any]]) -> None:
    tensors = [(key, value) for key, value in items if isinstance(value, Tensor)]
    for key, value in tensors:
        found[key] = without_graph(value)


def same_content(a: Any, b: Any) -> bool:
    """Whether what `content_of` gave twice is the same."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(map(operator.is_, a.values(), b.values())) and all(map(operator.is_, a, b))
    return all(map(operator.is_, a, b))
