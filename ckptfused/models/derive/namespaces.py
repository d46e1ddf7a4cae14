"""What code reads by name of modules, classes and objects beside those that its layer holds."""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, MutableSequence
from contextvars import ContextVar
from threading import local
from typing import Any

from torch import Tensor, nn

from ckptfused.state.reach import of_torch

NOT_FOLLOWED = frozenset(("torch", "ckptfused", *sys.stdlib_module_names))
"""Packages into whose code nobody looks."""
_TELLING = frozenset(("asyncio", "concurrent", "multiprocessing", "queue", "threading"))
_OF_A_THREAD = (local, ContextVar)
BUILTINS = frozenset((list, dict, set, tuple, deque))
_DEEP, _WIDE = 4, 256
_OTHER_CONTAINERS = (MutableSequence, MutableMapping, types.MappingProxyType)
_STEADY = ("transformers",)
SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getitem", "get", "enter", "exit", "bool"),
        *("float", "int", "index", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg"),
    )
)
"""Methods of objects that code calls without their names."""
_NAMESPACES = ("argparse", "types")
"""Modules of the standard library whose objects people take for a configuration."""


class Same:
    """A value as a part of a key, equal to itself alone while it lives. It is held only where it has to be."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        value = self._value()
        return self is other or (value is not None and value is other._value())


def is_followed(module: str | None) -> bool:
    """Whether what a module of that name defines is looked at."""
    return (module or "").partition(".")[0] not in NOT_FOLLOWED


def is_steady(value: Any) -> bool:
    """Whether a class or function is of a library whose caches and special methods say the same in a whole process."""
    return (getattr(value, "__module__", "") or "").partition(".")[0] in _STEADY


def opened(value: Any) -> bool:
    """Whether a value is an object whose attributes are looked at: a configuration."""
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    module = type(value).__module__
    return (module in _NAMESPACES or is_followed(module)) and type(getattr(value, "__dict__", 0)) is dict


def looked_up(value: Any, names: frozenset[str], seen: set[tuple[int, str]]) -> Iterator[tuple[Any, str, Any]]:
    """Attributes of these names that a module, a class or an object has: where they are held, the name, the value; and
    those of modules, classes and objects among them. seen: what was given before.
    """
    value = value() if isinstance(value, weakref.ref) else value
    if isinstance(value, type):
        holders = [cls for cls in value.__mro__ if cls is not object and not of_torch(cls)]
        module = value.__module__
    else:
        holders = [value]
        named = isinstance(value, types.FunctionType) and value.__module__
        module = value.__name__ if isinstance(value, types.ModuleType) else named or type(value).__module__
    apart = not is_followed(module) and not isinstance(value, nn.Module) and not opened(value)
    if value is None or apart or module.startswith("numpy"):
        return
    for holder in holders:
        held: Mapping[str, Any] = getattr(holder, "__dict__", {})
        for name in sorted(names.intersection(held)):
            special = name in SPECIAL and not is_steady(holder)
            if (id(holder), name) in seen or (name.startswith("__") and not special):
                continue
            seen.add((id(holder), name))
            yield held, name, held[name]
            if isinstance(held[name], types.ModuleType | type | nn.Module) or opened(held[name]):
                yield from looked_up(held[name], names, seen)


def why_untold(value: Any, held: bool = True) -> str:
    """Why nobody can tell what code does to a value that it holds, or reads in it; "" where this is known. held: the
    layer holds it; else it has a name that the code has, too.
    """
    kind = type(value)
    if isinstance(value, _OF_A_THREAD):
        return f"it reads a {kind.__name__}, which is another one in each thread"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return "it holds a NumPy array, whose changes leave no trace"
    if held and isinstance(value, _OTHER_CONTAINERS) and not isinstance(value, list | dict | deque):
        return f"it holds a {kind.__name__}, whose changes leave no trace"
    if held and (isinstance(value, Iterator) or kind.__module__.partition(".")[0] in _TELLING):
        return f"it holds a {kind.__name__}, of which nobody can tell what its code does to it"
    return ""


def slotted(value: Any) -> tuple[str, ...]:
    """The names of an object's `__slots__`, where its class is followed and has some."""
    if not is_followed(type(value).__module__):
        return ()
    found: list[str] = []
    for cls in type(value).__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return tuple(found)


def is_flat(value: Any, depth: int = 0) -> bool:
    """Whether a value is no object with attributes, and holds none: what is in a container of a module or class."""
    if isinstance(value, dict):
        value = [*dict.values(value)]
    if type(value) not in BUILTINS:
        return not opened(value) and not slotted(value) and not isinstance(value, nn.Module)
    return depth < _DEEP and len(value) < _WIDE and all(is_flat(v, depth + 1) for v in value)


def hashable(key: Any) -> Hashable:
    """A dict's key with its type, for another dict's key."""
    return (type(key), key) if isinstance(key, Hashable) else Same(key)
