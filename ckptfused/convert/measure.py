"""Bytes that a layer's own forward saves for backward, counted on fake tensors: nothing is computed."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ckptfused.convert.stand_ins import flash_attention, grouped_mm

TOKENS = 256
INDICES = ("layer_idx", "layer_id", "layer_index", "layer_number")  # by which a layer says where it stands


class IndexReadError(Exception):
    """A forward asks where its layer stands."""


class _Index:
    """In the place of such a number, of which nothing may be known: every operation of an integer raises."""

    def _read(self, *args: Any) -> Any:
        raise IndexReadError

    __getattr__ = __bool__ = __index__ = __int__ = __float__ = __eq__ = __hash__ = _read  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __str__ = __repr__ = __format__ = _read  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = _read
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __and__ = __rand__ = _read


def saved_by_autograd(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool = True) -> int:
    """Bytes in unique storages that autograd saves in one call, parameters, buffers and inputs' own copies aside.

    **Shapes** `args`, `kwargs`: as the layer takes them, real or meta tensors; x requires a gradient.
    Each storage counts once, as it is held once; x itself counts, since the call keeps it alive. Attention by
    `F.scaled_dot_product_attention` counts as a flash kernel's. Hooks of the layer itself, such as FSDP's, do not run.

    placed: whether the layer may know where in the model it stands. **Raises** `IndexReadError` where it does without.
    """
    mode = FakeTensorMode()
    move = lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value  # noqa: E731
    args, kwargs = torch.utils._pytree.tree_map(move, (args, kwargs))
    made: dict[int, Any] = {}
    with mode:
        twin = _twin(layer, made)
        if not placed:
            for module in twin.modules():
                vars(module).update({name: _Index() for name in INDICES if type(vars(module).get(name)) is int})
    owned = {storage(t) for t in made.values() if isinstance(t, Tensor)}
    owned |= {storage(t) for t in tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            # The storage is held, so that no other takes its place.
            found[storage(t)] = (t.untyped_storage(), t.untyped_storage().nbytes())
        return t

    flash = mock.patch.object(F, "scaled_dot_product_attention", _flash)
    grouped = mock.patch.object(F, "grouped_mm", grouped_mm, create=True)
    # What cannot be traced has no count; PyTorch would print pages about it.
    silent = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with flash, grouped, silent, mode, torch.enable_grad(), saving:
        twin.forward(*args, **kwargs)
    return sum(size for _, size in found.values())


def _flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of `F.scaled_dot_product_attention`."""
    return flash_attention(query, key, value)


def _twin(value: Any, made: dict[int, Any]) -> Any:
    """A module with tensors of the same shapes (whole ones for shards), and modules and containers of its own: what its
    forward keeps, replaces or registers there is not seen by the original. Other objects are shared.

    `made`: by the identity of the original, so that what is held twice stays one thing.
    """
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor):
        twin: Any = torch.empty(value.shape, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)
    elif isinstance(value, nn.Module):
        twin = made[id(value)] = object.__new__(type(value))
        twin.__dict__.update({name: _twin(held, made) for name, held in vars(value).items()})
    elif type(value) in (dict, OrderedDict, defaultdict):
        twin = made[id(value)] = copy.copy(value)
        twin.update({key: _twin(held, made) for key, held in value.items()})
    elif type(value) in (list, tuple, set):
        twin = type(value)(_twin(held, made) for held in value)
    else:
        return value
    made[id(value)] = twin
    return twin


def storage(t: Tensor) -> int:
    """What tells one storage from another."""
    return t.untyped_storage()._cdata


def stored_bytes(values: Iterable[Any]) -> int:
    """Of the unique storages of the tensors among these."""
    found = {storage(t): t.untyped_storage().nbytes() for t in values if isinstance(t, Tensor)}
    return sum(found.values())
