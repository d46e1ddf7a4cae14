"""Bytes that the layers of a model save, counted once for each kind of layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten
from ckptfused.compat.torch_modules import COMPILED_CALL
from ckptfused.models.derive.layer_state import KNOWN
from ckptfused.models.describe.example import KnownTables, with_tables
from ckptfused.models.describe.own_forward import INDICES, IndexReadError, Places, in_training, saved_by_autograd
from ckptfused.models.family import EXAMPLE_TOKENS
from ckptfused.models.hf_checkpointing import REPLICATE
from ckptfused.simulate.meta_copy import without_data

Count = Callable[[], float | None]

# What a count does not run: the layer's converted forward, its hooks (with hooks inside there is none), its compiled
# call.
_BESIDE = ("forward", REPLICATE, KNOWN, COMPILED_CALL, *(name for name in vars(nn.Module()) if "hook" in name))
_PLACE = "target_name"  # PEFT's note of where in the model a projection is, which no forward reads
_NUMBERS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class Counts:
    """Bytes that layers save, which are counted when they are asked for, once for each kind of layer.

    Layers are of a kind where their classes, settings, modes, tensors and arguments are the same: numbers and
    containers by value, tensors by shape and type, all else (functions, configurations) by identity. A layer's place
    in the model is no part of that, unless its forward reads it: then it is.
    """

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}
        self.tables: KnownTables = {}

    def of(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Count:
        """What says how many bytes a token the layer saves in this call, as both are now; None where its forward
        fails without data. No tensor of theirs is held, and nothing runs before it is asked.
        """
        key = kind_of(layer, args, kwargs)
        if key not in self._kinds:
            self._kinds[key] = _Kind(layer, args, kwargs)
        places = tuple(
            (name, i, vars(m)[i]) for name, m in layer.named_modules() for i in INDICES if type(vars(m).get(i)) is int
        )
        return partial(self._kinds[key].per_token, places)


class _Kind:
    """A layer of a kind without its data, and what was counted of it."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with in_training():
            self._layer, self._call = without_data((layer, (args, kwargs)))
        for name in _BESIDE[:2]:
            vars(self._layer).pop(name, None)
        self._found: dict[Places | None, float | None] = {}
        self._reads_place = False
        self._counting = threading.RLock()

    def per_token(self, places: Places) -> float | None:
        """Bytes a token. places: the numbers by which the layer and what is in it say where they stand."""
        with self._counting:
            if not self._reads_place:
                try:
                    return self._count(None)
                except IndexReadError:
                    self._reads_place = True
            return self._count(places)

    def _count(self, places: Places | None) -> float | None:
        if places not in self._found:
            args, kwargs = self._call
            try:
                self._found[places] = saved_by_autograd(self._layer, args, with_tables(kwargs), places) / EXAMPLE_TOKENS
            except IndexReadError:
                raise
            except Exception:  # a count for the table: any forward may raise anything on arguments that were guessed
                self._found[places] = None
        return self._found[places]


def kind_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
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
