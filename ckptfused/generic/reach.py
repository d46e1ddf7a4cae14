"""What a function can read and write beside its arguments, as far as it can be found."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 6  # steps at most from a function to a module: a closure's dict of objects with lists of layers takes 5
WIDTH = 256  # values at most that are looked at in one container
LIMIT = 2000  # and in all: nearest first

_NOTHING_INSIDE = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})


@dataclass
class Reached:
    """What was found."""

    modules: list[nn.Module] = field(default_factory=list)
    """With all submodules."""
    objects: list[Any] = field(default_factory=list)
    """Other objects with attributes."""
    containers: list[Any] = field(default_factory=list)
    """Lists, dicts, sets and deques of at most WIDTH values."""
    tensors: list[Tensor] = field(default_factory=list)
    """Those in none of the modules."""
    generators: list[torch.Generator] = field(default_factory=list)


def reach(roots: Iterable[Any]) -> Reached:
    """What is found from functions, modules, and containers of these.

    Looked through: modules, bound methods, partials, closures, defaults, globals that the code names, containers, and
    attributes of objects. Nothing of Python's or PyTorch's own is looked into.
    """
    found = Reached()
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    layer = [*roots]
    for _ in range(DEPTH):
        further: list[Any] = []
        for value in layer:
            kind = type(value)
            if kind in _NOTHING_INSIDE or id(value) in seen:
                continue
            if len(seen) == LIMIT:
                break
            seen.add(id(value))
            if isinstance(value, Tensor):
                found.tensors.append(value)
            elif isinstance(value, nn.Module):
                modules.update((id(module), module) for module in value.modules())
            elif isinstance(value, torch.Generator):
                found.generators.append(value)
            else:
                further.extend(_parts(value, found))
        layer = further
    found.modules = list(modules.values())
    return found


def _parts(value: Any, found: Reached) -> Iterable[Any]:
    if isinstance(value, (dict, list, set, deque)):
        if type(value) in CONTAINERS and len(value) <= WIDTH:
            found.containers.append(value)
        return itertools.islice(value.values() if isinstance(value, dict) else value, WIDTH)
    if isinstance(value, (tuple, frozenset)):
        return itertools.islice(value, WIDTH)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, (type, types.ModuleType)):
        return ()
    kind: Any = type(value)
    try:
        slots = [getattr(value, name) for name in _slots(kind) if hasattr(value, name)]
        held = vars(value) if hasattr(value, "__dict__") else None
        parts = [*(held or {}).values(), *slots, kind.__call__ if callable(value) else None]
    except Exception:  # no attributes, or a proxy for something that is not there
        return ()
    if type(held) is dict:
        found.objects.append(value)
    return parts


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    return tuple(itertools.chain.from_iterable((names,) if isinstance(names, str) else names for names in found))


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    if function.__module__ and function.__module__.split(".")[0] == "torch":
        return []
    parts: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts.extend(function.__dict__.values())
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    found = map(function.__globals__.get, _names(function.__code__))
    parts.extend(value for value in found if type(value) not in _NOTHING_INSIDE)
    return parts


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code, and that of the functions in it, looks up among its globals."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*own, *itertools.chain.from_iterable(inner)]))
