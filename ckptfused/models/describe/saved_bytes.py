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

from ckptfused.compat.kernels import replaced
from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import FAKE_LOGGER, FakeTensor, FakeTensorMode
from ckptfused.compat.torch_memory import storage_id
from ckptfused.simulate.stand_ins import flash_attention, grouped_mm
from ckptfused.state.undone import without_trace

TOKENS = 256
INDICES = ("layer_idx", "layer_id", "layer_index", "layer_number")  # by which a layer says where it stands


Places = tuple[tuple[str, str, int], ...]
"""Such numbers: the module's name within the layer, the attribute's, and the number."""


class IndexReadError(Exception):
    """A forward asks where its layer stands."""


class _Index:
    """A stand-in for a number that nothing may depend on: every operation of an integer raises."""

    def _read(self, *args: Any) -> Any:
        raise IndexReadError

    __getattr__ = __bool__ = __index__ = __int__ = __float__ = __eq__ = __hash__ = _read  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __str__ = __repr__ = __format__ = _read  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = _read
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __and__ = __rand__ = _read


class Like:
    """A tensor's shape and type, in its place."""

    __slots__ = ("device", "dtype", "requires_grad", "shape")

    def __init__(self, t: Tensor) -> None:
        self.shape, self.dtype, self.device, self.requires_grad = t.shape, t.dtype, t.device, t.requires_grad

    def made(self) -> Tensor:
        """A tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


def described(value: Any) -> Any:
    """A copy of modules, and of containers, with a `Like` in the place of each tensor: it keeps no memory, and what
    becomes of the original is not seen in it.
    """
    return _meta_copy(value, {}, Like)


def saved_by_autograd(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], places: Places | None) -> int:
    """Bytes in unique storages that autograd saves in one call, parameters, buffers and inputs' own copies aside.

    **Shapes** `layer`, `args`, `kwargs`: as `described` makes them; x requires a gradient.
    Each storage counts once, as it is held once; x itself counts, since the call keeps it alive. Attention by
    `F.scaled_dot_product_attention` counts as a flash kernel's. Hooks of the layer itself, such as FSDP's, do not run.
    The forward runs, with all that it does to what it reaches; `without_trace` undoes that.

    places: by what numbers the layer says where in the model it stands. None: it may not know, and where it asks,
    **raises** `IndexReadError`.
    """
    mode = FakeTensorMode()
    made: dict[int, Any] = {}
    with _training(), mode:
        args, kwargs = _meta_copy((args, kwargs), {}, _tensor)
        meta_copy = _meta_copy(layer, made, _tensor)
    for module in meta_copy.modules() if places is None else ():
        vars(module).update({index: _Index() for index in INDICES if type(vars(module).get(index)) is int})
    for name, index, number in places or ():
        vars(meta_copy.get_submodule(name))[index] = number
    owned = {storage(t) for t in made.values() if isinstance(t, Tensor)}
    owned |= {storage(t) for t in tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            # The storage is held, so that no other takes its place.
            found[storage(t)] = (t.untyped_storage(), t.untyped_storage().nbytes())
        return t

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with without_trace(meta_copy), replaced(_KERNELS), _silent(), _training(), mode, saving:
        meta_copy.forward(*args, **kwargs)
    return sum(size for _, size in found.values())


@contextlib.contextmanager
def _training() -> Iterator[None]:
    """A context in which PyTorch's modes are those of a step, whatever they are where somebody asks for a count."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _tensor(like: Any) -> Tensor:
    return (like if isinstance(like, Like) else Like(like)).made()


def _flash(below: Callable[..., Tensor], query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(query, FakeTensor):
        return below(query, *args, **kwargs)
    return flash_attention(query, *args[:2])


def _grouped(below: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (grouped_mm if isinstance(input, FakeTensor) else below)(input, *args, **kwargs)


_KERNELS = {"aten::scaled_dot_product_attention": _flash, "aten::_grouped_mm": _grouped}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """A context in which this thread's calls that cannot be traced are not logged: they have no count, and PyTorch
    would print pages about each.
    """
    log, mine = logging.getLogger(FAKE_LOGGER), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return threading.get_ident() != mine

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


def _meta_copy(value: Any, made: dict[int, Any], tensor: Callable[[Any], Any]) -> Any:
    """A module with what `tensor` makes of its tensors (whole ones of shards), and modules and containers of its own:
    what its forward keeps, replaces or registers there is not seen by the original. Other objects are shared.

    `made`: by the identity of the original, so that what is held twice stays one thing.
    """
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor | Like):
        meta_copy: Any = tensor(value)
    elif isinstance(value, nn.Module):
        meta_copy = made[id(value)] = object.__new__(type(value))
        meta_copy.__dict__.update({name: _meta_copy(held, made, tensor) for name, held in vars(value).items()})
    elif type(value) in (dict, OrderedDict, defaultdict):
        meta_copy = made[id(value)] = copy.copy(value)
        meta_copy.update({key: _meta_copy(held, made, tensor) for key, held in value.items()})
    elif type(value) in (list, tuple, set):
        meta_copy = type(value)(_meta_copy(held, made, tensor) for held in value)
    else:
        return value
    made[id(value)] = meta_copy
    return meta_copy


def storage(t: Tensor) -> int:
    """What tells one storage from another."""
    return storage_id(t)


def stored_bytes(values: Iterable[Any]) -> int:
    """Bytes of the unique storages of the tensors among these values."""
    found = {storage(t): t.untyped_storage().nbytes() for t in values if isinstance(t, Tensor)}
    return sum(found.values())
