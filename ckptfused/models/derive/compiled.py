"""Derived layers under torch.compile: what a call computes is found out while it is traced.

Dynamo guards on what it reads, and no compiled code is one layer's: the trace reads the plain attributes of modules and
configurations that the layer's code may read, and whatever layer of its class has the same stands for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten
from ckptfused.compat.torch_compile import constant_result
from ckptfused.compat.torch_distributed import own_class
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.spec_text import settled
from ckptfused.models.derive.calls import Ready, ready, seen
from ckptfused.models.derive.layer_state import opened
from ckptfused.models.derive.rules.rotations import is_computed
from ckptfused.models.describe.own_forward import INDICES

_PLAIN = (int, float, bool, str, type(None))
_LAYERS: dict[type, weakref.WeakSet[nn.Module]] = {}
AttributeReads = tuple[tuple[str, str, str], ...]
"""Attributes: the path of a module, the name under which it holds the object that has it ("" itself), its own name."""


def known_to_compiler(layer: nn.Module) -> None:
    """Makes a converted layer known before its calls are traced."""
    _LAYERS.setdefault(own_class(type(layer)), weakref.WeakSet()).add(layer)


def ready_in_compiler(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: int) -> Any:
    """`calls.ready`, while Dynamo traces: a `Ready` or a `Reason`."""
    paths, reads = _reads_of(type(layer))
    for path in paths:
        if path and (why := watched(layer.get_submodule(path))) is not None:
            return why
    values = _values(layer, reads)
    found = _found(type(layer), values, _described(args), _described(kwargs), where)
    return Reason(found) if isinstance(found, str) else found


def _described(value: Any) -> Any:
    """A call's arguments as constants. Sizes are specialised."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype, tuple([settled(n) for n in value.shape])
    if isinstance(value, dict):
        return "dict", tuple([(k, _described(v)) for k, v in value.items()])
    if isinstance(value, tuple | list):
        return "list" if isinstance(value, list) else "tuple", tuple([_described(v) for v in value])
    return "plain", settled(value)


def _made(kind: str, *of: Any) -> Any:
    """Arguments as they were described, without data."""
    if kind == "tensor":
        return torch.empty(of[1], dtype=of[0], device="meta")
    if kind == "dict":
        return {k: _made(*v) for k, v in of[0]}
    if kind == "plain":
        return of[0]
    return (list if kind == "list" else tuple)(_made(*v) for v in of[0])


@constant_result
def _reads_of(cls: type[nn.Module]) -> tuple[tuple[str, ...], AttributeReads]:
    """The paths of modules and the attributes that some layer of a class has: others lack one, or differ in it."""
    for layer in _LAYERS.get(own_class(cls), ()):
        return _reads(layer)
    return (), ()


def _reads(layer: nn.Module) -> tuple[tuple[str, ...], AttributeReads]:
    one, reads = seen(layer), []
    names = frozenset() if isinstance(one, Reason) else one.state.names
    for path, module in layer.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") or key in INDICES:
                continue
            if type(value) in _PLAIN:
                reads.append((path, "", key))
            elif opened(value):
                reads += [(path, key, name) for name, v in vars(value).items() if name in names and type(v) in _PLAIN]
    return tuple(path for path, _ in layer.named_modules()), tuple(reads)


@constant_result
def _found(cls: type[nn.Module], values: Any, args: Any, kwargs: Any, where: int) -> Ready | str:
    """What is proved of all layers of a class whose attributes are these, or why nothing is."""
    call = _made(*args), _made(*kwargs)
    leaves, tree = tree_flatten(call)
    reads, kinds = _reads_of(cls)[1], {}
    for layer in _LAYERS.get(own_class(cls), ()):
        if _values(layer, reads) == values:
            one = seen(layer)
            if isinstance(one, Reason) or one.state.why:
                return one.text if isinstance(one, Reason) else one.state.why
            kinds[id(one.kind)] = one, layer
    if len(kinds) != 1:
        return "torch.compile cannot tell it from others of its class"
    one, layer = next(iter(kinds.values()))
    found = ready(one, layer, call, leaves, tree, where)
    if one.kind.by_place:
        return "torch.compile cannot tell where in the model it stands"
    if isinstance(found, Reason):
        return found.text
    if len(found.leaves) > 1 or not found.tree.is_leaf():
        return "torch.compile cannot follow what it returns beside its result"
    made = found.rest is not None or found.layout.also or any(is_computed(t.form) for t in found.layout.outer)
    if made or found.recipes:
        return "torch.compile cannot follow what it makes of its arguments"
    return found._replace(returned={})


def _values(layer: nn.Module, reads: AttributeReads) -> Any:
    """The attributes of a layer, and what is told of its weights; None where it lacks an attribute."""
    values: list[Any] = []
    for path, within, name in reads:
        module: Any = layer.get_submodule(path)
        held = getattr(module, within, None) if within else module
        if not hasattr(held, name):
            return None
        values.append(settled(getattr(held, name)))
    for weight in layer.parameters():
        values.append((weight.dtype, tuple(weight.shape)))
    return tuple(values)
