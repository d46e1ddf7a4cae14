"""Running statistics that a replay must not update again."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

DEPTH = 6  # steps at most from a function to a module: a closure's dict of objects with lists of layers takes 5
WIDTH = 256  # values at most that are looked at in one container
LIMIT = 2000  # and in all: some milliseconds, nearest first


@contextmanager
def kept(modules: Iterable[nn.Module], copy: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Batch and instance norms among the modules update copies of their buffers; afterwards they have their own again.

    In training the results of these modules do not depend on the buffers, so the replay computes the same.
    """
    replaced = [
        (module._buffers, name, buffer)
        for module in modules
        if isinstance(module, _NormBase) and module.training
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        for buffers, name, buffer in replaced:
            buffers[name] = copy(buffer)
        yield
    finally:
        for buffers, name, buffer in replaced:
            buffers[name] = buffer


def modules_of(root: Any) -> list[nn.Module]:
    """The modules, with all submodules, that are found from a function or from containers of functions and modules.

    Looked through: modules, bound methods, partials, closures, defaults, globals that the code names, containers, and
    attributes of objects. Nothing of Python's or PyTorch's own is looked into.
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    layer = [root]
    for _ in range(DEPTH):
        further: list[Any] = []
        for value in layer:
            if id(value) in seen or len(seen) == LIMIT:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                found.update((id(module), module) for module in value.modules())
            else:
                further.extend(_parts(value))
        layer = further
    return list(found.values())


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (Tensor, str, bytes, int, float, complex, type, types.ModuleType)) or value is None:
        return ()
    if isinstance(value, dict):
        return itertools.islice(value.values(), WIDTH)
    if isinstance(value, (list, tuple, set, frozenset)):
        return itertools.islice(value, WIDTH)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    try:
        return [*vars(value).values(), type(value).__call__ if callable(value) else None]
    except Exception:  # no attributes, or a proxy for something that is not there
        return ()


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    if function.__module__ and function.__module__.split(".")[0] == "torch":
        return []
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        parts.extend(function.__globals__[name] for name in code.co_names if name in function.__globals__)
    return parts
