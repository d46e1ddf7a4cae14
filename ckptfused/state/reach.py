"""What a function can read and write beside its arguments, as far as it can be found."""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import queue
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.state.containers import Unseen
from ckptfused.state.generators import behind, is_generator, is_global

DEPTH = 6  # steps at most from a function to a module: a closure's dict of objects with lists of layers takes 5
WIDTH = 256  # values at most that are looked at in one container
MOST_REACHED = 2000  # and in all: nearest first

_NOTHING_INSIDE = frozenset(
    {
        Unseen,
        *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)


_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_BOUND = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})
_FILLED = frozenset({dict, list, set, deque})
_MAY_DRAW = frozenset({types.ModuleType, types.BuiltinFunctionType})


@dataclass
class Reached:
    """What was found."""

    modules: list[nn.Module] = field(default_factory=list)
    """The modules, with all submodules."""
    objects: list[Any] = field(default_factory=list)
    """Other objects with attributes."""
    containers: list[Any] = field(default_factory=list)
    """Lists, dicts, sets and deques of at most WIDTH values."""
    functions: list[types.FunctionType] = field(default_factory=list)
    long: list[Any] = field(default_factory=list)
    """Lists, dicts, sets and deques of more values."""
    classes: list[type] = field(default_factory=list)
    """The classes that methods are bound to, and those that code names or is closed over."""
    near: list[Any] = field(default_factory=list)
    """The objects and containers that a root is, is bound to, or has in its closure, defaults or arguments."""
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors that are in none of the modules."""
    generators: list[Any] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    """Iterators and queues: what is taken from them, or put there, cannot be undone."""


def reach(roots: Iterable[Any]) -> Reached:
    """What is found from functions, modules, and containers of these.

    Looked through: modules, bound methods, partials, closures, defaults, globals that the code names, containers,
    attributes of objects and classes, and those of imported modules that the code names and that are containers or
    tensors. Nothing of Python's or PyTorch's own is looked into.
    """
    near, far = [*roots], list[Any]()
    if len(near) == 1 and isinstance(near[0], nn.Module):
        return Reached(below(near[0]))
    found = Reached()
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    for _ in range(DEPTH):
        if not near and not far:
            break
        count, layer = len(near), near + far
        near, far = [], []
        for i, value in enumerate(layer):
            kind: Any = type(value)
            if kind in _BOUND and type(value.__self__) in _FILLED:  # the `append` of a list
                value, kind = value.__self__, type(value.__self__)
            if (kind in _NOTHING_INSIDE and kind is not type) or id(value) in seen:
                continue
            if len(seen) == MOST_REACHED:
                break
            seen.add(id(value))
            if isinstance(value, Tensor):
                found.tensors.append(value)
            elif isinstance(value, nn.Module):
                modules.update((id(module), module) for module in below(value))
            elif is_generator(kind):
                found.generators.append(value)
            else:
                held, beyond = _parts(value, found)
                if i < count:
                    near.extend(held)
                    if kind not in _LOOKED_THROUGH:
                        found.near.append(value)
                else:
                    far.extend(held)
                far.extend(beyond)
    found.modules = list(modules.values())
    return found


_children = operator.attrgetter("_modules")
# By a root's identity: references to it and what is below, and the identities of the children of each.
_trees: dict[int, tuple[list[weakref.ref[nn.Module]], list[int]]] = {}


def below(root: nn.Module) -> list[nn.Module]:
    """A module with all submodules; they are looked for again where one has other children than at the last call."""
    if not root._modules:
        return [root]
    place = id(root)
    references, children = _trees.get(place, ((), ()))
    modules = [reference() for reference in references]
    if modules and modules[0] is root and None not in modules and _identities(modules) == children:
        return modules  # type: ignore[return-value]
    present = list(root.modules())
    ends = weakref.ref(root, lambda _: _trees.pop(place, None))
    _trees[place] = [ends, *map(weakref.ref, present[1:])], _identities(present)
    return present


def _identities(modules: Iterable[Any]) -> list[int]:
    children = map(_children, modules)
    return list(map(id, itertools.chain.from_iterable([held.values() for held in children if held])))


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_QUEUES = (queue.Queue, queue.SimpleQueue)
_HOLDING = (dict, list, set, deque, Tensor)
_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_LOOKED_THROUGH = frozenset({*_FUNCTIONS, tuple, frozenset})
_Parts = tuple[Iterable[Any], Iterable[Any]]


def _parts(value: Any, found: Reached) -> _Parts:
    """What a value holds, as its own and beyond that: by way of a global name, or of an object's attribute."""
    if isinstance(value, (dict, list, set, deque)):
        (found.containers if len(value) <= WIDTH else found.long).append(value)
        return itertools.islice(value.values() if isinstance(value, dict) else value, WIDTH), ()
    if isinstance(value, (tuple, frozenset)):
        return itertools.islice(value, WIDTH), ()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords), ()
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__), ()
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, found)
    if isinstance(value, type):
        return (), _parts_of_class(value, found)
    if isinstance(value, types.ModuleType):
        return (), ()
    kind: Any = type(value)
    if issubclass(kind, _QUEUES) or (kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")):
        found.streams.append(value)
    try:
        slots = [getattr(value, name) for name in slots_of(kind) if hasattr(value, name)]
        held = vars(value) if hasattr(value, "__dict__") else None
        parts = [*(held or {}).values(), *slots]
        call = (kind.__call__,) if callable(value) else ()
    except Exception:  # no attributes, or a proxy for something that is not there
        return (), ()
    if type(held) is dict:
        found.objects.append(value)
    return (*call, *(part for part in parts if isinstance(part, _FUNCTIONS))), parts


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[str, ...]:
    """The attributes of an object that are in none of its dicts."""
    names: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if not name.startswith("__"))


def _is_library(name: Any) -> bool:
    """Whether a module, by its name, is Python's, PyTorch's or NumPy's."""
    return str(name).split(".")[0] in _LIBRARIES


def _parts_of_class(kind: Any, found: Reached) -> list[Any]:
    """What the attributes of a class that is nobody's library's hold."""
    if _is_library(kind.__module__):
        return []
    found.classes.append(kind)
    return [value for value in vars(kind).values() if isinstance(value, _HOLDING)]


def _parts_of_function(function: types.FunctionType, found: Reached) -> _Parts:
    if of_torch(function):
        return (), ()
    found.functions.append(function)
    own: list[Any] = [*(function.__defaults__ or ())]
    own.extend(held for held in (function.__kwdefaults__, function.__dict__) if held)
    for cell in function.__closure__ or ():
        try:
            own.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    beyond: list[Any] = []
    value: Any
    for value in map(function.__globals__.get, names_of(function.__code__)):
        kind = type(value)
        if kind not in _NOTHING_INSIDE or kind is type:
            beyond.append(value)
        if kind is types.ModuleType and not _is_library(value.__name__):
            named = map(vars(value).get, attributes_of(function.__code__))
            beyond.extend(one for one in named if isinstance(one, _HOLDING))
        if kind in _MAY_DRAW and (g := behind(value, _says_random(function.__code__))) is not None:
            beyond.append(g)
    for module in map(sys.modules.get, imports_of(function.__code__)):
        if module is not None and (g := behind(module, _says_random(function.__code__))) is not None:
            beyond.append(g)
    return own, beyond


@functools.lru_cache(maxsize=4096)
def drawn_by(kind: Any) -> list[Any]:
    """The generators of the module `random` and of NumPy, where methods of a module's class name them."""
    return [g for g in generators_of(kind) if is_global(g)]


def generators_of(kind: Any) -> list[Any]:
    """The generators that methods of a module's class reach."""
    own = itertools.chain.from_iterable(vars(base).values() for base in kind.__mro__ if not of_torch(base))
    inner = [getattr(value, name, value) for value in own for name in ("__func__", "fget", "func")]
    functions = [value for value in inner if isinstance(value, types.FunctionType)]
    return reach(functions).generators


def of_torch(value: Any) -> bool:
    """Whether a class or a function is PyTorch's own; one that `functools.wraps` one of PyTorch's is not, nor is one of
    PyTorch's that wraps another.
    """
    names = [value.__module__]
    if isinstance(value, types.FunctionType):
        names.append(value.__globals__.get("__name__"))
    return all(map(_is_of_torch, names))


@functools.lru_cache(maxsize=4096)
def _is_of_torch(name: Any) -> bool:
    return (name or "").split(".")[0] == "torch"


def content_of_object(value: Any) -> dict[str, Any] | None:
    """The attributes of an object whose class is no library's; None of anything else, and of what may be called."""
    kind: Any = type(value)
    held = None if isinstance(value, nn.Module | Tensor | type) or callable(value) else getattr(value, "__dict__", None)
    return held if type(held) is dict and not _is_library(kind.__module__) else None


@functools.lru_cache(maxsize=4096)
def _says_random(code: types.CodeType) -> bool:
    """Whether the code, or that of a function in it, has `random` among its names."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return "random" in code.co_names or any(map(_says_random, inner))


@functools.lru_cache(maxsize=4096)
def attributes_of(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code, and that of the functions in it, may look up as attributes: all that it has,
    and its strings, which `getattr` may take.
    """
    inner = (attributes_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    strings = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset(itertools.chain(code.co_names, strings, *inner))


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> tuple[str, ...]:
    """The modules that a function's code, and that of the functions in it, imports."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    inner = (imports_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*own, *itertools.chain.from_iterable(inner)]))


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code, and that of the functions in it, looks up or assigns among its globals."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _OF_GLOBALS)
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*own, *itertools.chain.from_iterable(inner)]))
