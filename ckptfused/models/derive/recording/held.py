"""What modules hold beside parameters, by the names that a recording gives it."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.torch_compile import constant_result

BOOKS = vars(nn.Module()).keys() - {"training"}
"""What modules keep of themselves; their buffers and parameters are looked at by themselves."""


def tensors_held(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside parameters, by name: buffers, plain attributes, and what lies in these."""
    for name, module in layer.named_modules():
        for key, t in held_by(module):
            if isinstance(t, Tensor):
                yield f"{name}.{key}".lstrip("."), t


def held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Buffers and attributes of a module by name, and as `cache['cos']` what lies in a list, tuple or dict there."""
    for key, held in (*module._buffers.items(), *vars(module).items()):
        yield key, held
        if key not in BOOKS and type(held) in (list, tuple, dict):
            items = held.items() if isinstance(held, dict) else enumerate(held)
            yield from ((f"{key}[{at!r}]", v) for at, v in items if type(at) in (int, str) and "." not in repr(at))


def held_value(module: nn.Module, key: str) -> Any:
    """What `held_by` gives this name."""
    if hasattr(module, key):
        return getattr(module, key)
    name, at = _place_within(key)
    return getattr(module, name)[at]


@constant_result
def _place_within(key: str) -> tuple[str, int | str]:
    name, _, item = key.rpartition("[")
    return name, literal_eval(item.removesuffix("]"))
