"""Bytes that the layers of a model save, counted once for each kind of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ckptfused.convert.measure import INDICES, TOKENS, IndexReadError, saved_by_autograd

# What a count does not run: hooks of the layer (with hooks inside there is none), and its compiled call.
_BESIDE = ("_compiled_call_impl", *(name for name in vars(nn.Module()) if "hook" in name))
_PLACE = "target_name"  # PEFT's note of where in the model a projection is, which no forward reads
_NUMBERS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class Counts:
    """What `saved_by_autograd` counts, remembered within one `convert`.

    Layers are of a kind where their classes, settings, modes, tensors and arguments are the same: numbers and
    containers by value, tensors by shape and type, all else (functions, configurations) by identity. A layer's place
    in the model is no part of that, unless its forward reads it: then it is.
    """

    def __init__(self) -> None:
        self._found: dict[Any, int | Exception] = {}

    def per_token(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Bytes a token that the layer saves in this call. **Raises** what its forward raises on fake tensors."""
        key: Any = kind(layer, args, kwargs)
        found = self._count(key, layer, args, kwargs, False)
        if isinstance(found, IndexReadError):
            places = tuple((name, vars(m)[i]) for name, m in layer.named_modules() for i in INDICES if i in vars(m))
            found = self._count((key, places), layer, args, kwargs, True)
        if isinstance(found, Exception):
            raise found
        return found / TOKENS

    def _count(self, key: Any, layer: nn.Module, args: Any, kwargs: Any, placed: bool) -> int | Exception:
        if key not in self._found:
            try:
                self._found[key] = saved_by_autograd(layer, args, kwargs, placed)
            except Exception as error:  # as true of the next layer of this kind
                self._found[key] = error.with_traceback(None)
        return self._found[key]


def kind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All that decides what a layer's forward does with these arguments, its place in the model aside."""
    seen: dict[int, int] = {}
    leaves, tree = tree_flatten((args, kwargs))
    return _value(layer, seen), str(tree), tuple(_value(leaf, seen) for leaf in leaves)


def _value(value: Any, seen: dict[int, int]) -> Any:
    """A value as a part of a key. seen: modules and tensors met so far: what is shared is not what is equal."""
    if isinstance(value, nn.Module | Tensor):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        return type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        kept = ((k, v) for k, v in vars(value).items() if k not in _BESIDE and not (k in INDICES and type(v) is int))
        return type(value), type(value).forward, tuple((k, _value(v, seen)) for k, v in kept)
    if isinstance(value, dict):
        return type(value), tuple((_value(k, seen), _value(v, seen)) for k, v in value.items() if k != _PLACE)
    if type(value) is set:
        return set, frozenset(_value(v, seen) for v in value)
    if type(value) in (list, tuple):
        return type(value), tuple(_value(v, seen) for v in value)
    return type(value), value if type(value) in _NUMBERS else id(value)
