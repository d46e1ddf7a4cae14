"""Bytes that a layer's own forward saves for backward, counted on fake tensors: nothing is computed."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ckptfused.compat.kernels import replaced
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

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with replaced(COUNTED_KERNELS), _silent(), mode, torch.enable_grad(), saving:
        twin.forward(*args, **kwargs)
    return sum(size for _, size in found.values())


def _flash(below: Callable[..., Tensor], query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(query, FakeTensor):
        return below(query, *args, **kwargs)
    return flash_attention(query, *args[:2])


def _grouped(below: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (grouped_mm if isinstance(input, FakeTensor) else below)(input, *args, **kwargs)


COUNTED_KERNELS = {"aten::scaled_dot_product_attention": _flash, "aten::_grouped_mm": _grouped}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Within, this thread's calls that cannot be traced are not logged: they have no count, and PyTorch would print
    pages about each.
    """
    log, mine = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return threading.get_ident() != mine

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


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
