"""A model without its data: what it does to memory can be seen of it, and the model itself is left alone."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_dispatch import is_traceable_wrapper_subclass
from ckptfused.compat.torch_memory import StorageWeakRef, sparse_bytes, storage_behind, storage_id
from ckptfused.simulate.unseen import note_unseen
from ckptfused.state.fingerprints import batch_leaves, is_record

T = TypeVar("T")


_ORIGINAL = "_ckptfused_original"
_OWN = ("_parameters", "_buffers", "_modules")


class _Original:
    """Holds a tensor for its copies without data, and for copies of these."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __deepcopy__(self, memo: Any) -> _Original:
        return self


def data_behind(t: Tensor) -> Tensor:
    """What a buffer is a copy without data of; else itself."""
    held = vars(t).get(_ORIGINAL)
    return t if held is None else held.t  # type: ignore[no-any-return]


def copy_to_meta(model: nn.Module, optimizer: T) -> tuple[nn.Module, T]:
    """A copy of a model, and of what holds its parameters, on the meta device.

    Tensors that share a storage share one there; hooks, converted layers, adapters and checkpoints are those of the
    model. A number on the CPU that is neither parameter nor buffer stays one, for code that looks at it. Of a
    `DistributedDataParallel` it is the module within, with its buckets as a buffer.
    **Raises** `ValueError` where a model cannot be copied, or its tensors are parts of distributed ones.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t).__name__ == "DTensor":
            raise ValueError(
                f"model: expected whole tensors, got {name}, a DTensor: predict the model before it is sharded"
            )
    owned = [*model.parameters(), *model.buffers()]
    # A copy of a quantised weight of bitsandbytes' holds the module of the one that it was made of.
    holders = {id(m): m for t in owned for m in vars(t).values() if isinstance(m, nn.Module)}.values()
    owned = [*(p for module in holders for p in module.parameters()), *owned]
    memo: dict[int, Any] = {}
    try:
        with _WithoutData({id(t) for t in owned}) as copies:
            for t in owned:
                if not is_lazy(t) and type(t).__deepcopy__ not in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__):
                    copies.copy(t, memo)  # as bitsandbytes' quantised weights, which make a copy of data of their own
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    memo[id(module)] = _replica(module, memo)
                held = (value for value in tree_leaves(vars(module)) if isinstance(value, torch.Generator))
                memo.update((id(generator), generator.clone_state()) for generator in held)
            meta_copy = copy.deepcopy((model, optimizer), memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError, SystemError) as error:
        raise ValueError(f"model: expected one that copy.deepcopy copies, got {error}") from error
    note_unseen(model, meta_copy[0])
    for module in meta_copy[0].modules():
        if "forward" in vars(module):
            vars(module)["forward"] = _rebound(vars(module)["forward"], memo)
    return meta_copy


def _rebound(value: Any, memo: dict[int, Any], depth: int = 4) -> Any:
    """A forward that somebody put around a module's own, whose closure knows the copies: functions are not copied.

    TRL's trainers keep the forward that they replace so, and accelerate's autocast, an object, keeps theirs.
    """
    if isinstance(value, types.MethodType):
        owner = memo.get(id(value.__self__), value.__self__)
        return types.MethodType(_rebound(value.__func__, memo, depth), owner)
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if not isinstance(value, types.FunctionType):
        return _rebound_object(value, memo, depth)
    try:
        held = [cell.cell_contents for cell in value.__closure__ or ()] if depth else []
    except ValueError:  # an empty cell, of a function that is not yet made
        return value
    cells = [_rebound(inner, memo, depth - 1) for inner in held]
    if not held or all(a is b or a == b for a, b in zip(held, cells, strict=True)):
        return value
    made = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(map(types.CellType, cells))
    )
    made.__kwdefaults__, made.__qualname__, made.__module__ = value.__kwdefaults__, value.__qualname__, value.__module__
    made.__dict__.update(vars(value))
    return made


def _rebound_object(value: Any, memo: dict[int, Any], depth: int) -> Any:
    """An object of a Python class that is called for a forward, with those of its attributes that know a module."""
    plain = callable(value) and type(value).__new__ is object.__new__ and not isinstance(value, type)
    held = getattr(value, "__dict__", None) if plain and depth else None
    if not held:
        return value
    found = {name: _rebound(inner, memo, depth - 1) for name, inner in held.items()}
    if all(found[name] is inner or found[name] == inner for name, inner in held.items()):
        return value
    made = object.__new__(type(value))
    made.__dict__.update(found)
    return made


def without_data(value: T) -> T:
    """The same batch, or module, with tensors on the meta device (whole ones of shards). Modules, containers and
    dataclasses are its own: what a forward keeps, replaces or registers there is not seen by the original. Other
    objects are shared.

    What is one tensor, module or set stays one.
    """
    made: dict[int, Any] = {}

    def meta_copy(value: Any) -> Any:
        if not isinstance(value, Tensor | nn.Module | set) and not is_record(value):
            return value
        if id(value) not in made:
            if is_record(value):
                made[id(value)] = copied = copy.copy(value)
                for part in dataclasses.fields(value):
                    object.__setattr__(copied, part.name, tree_map(meta_copy, getattr(value, part.name)))
            elif isinstance(value, nn.Module):
                made[id(value)] = copied = object.__new__(type(value))
                copied.__dict__.update(tree_map(meta_copy, vars(value)))
            else:
                made[id(value)] = set(map(meta_copy, value)) if isinstance(value, set) else _like(value)
        return made[id(value)]

    return tree_map(meta_copy, value)


def _like(t: Tensor) -> Tensor:
    known = type(t) in (Tensor, nn.Parameter) or t.is_nested
    if known and (t.layout != torch.strided or t.is_nested or t.is_conj()):
        found = t.detach().to("meta")
    elif known:  # a slice of something larger stays as strewn, and may be copied
        found = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    else:
        found = torch.empty(t.shape, dtype=t.dtype, device="meta")
    return found.requires_grad_(t.requires_grad)


def trained_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch that get gradients, which no step ends."""
    return [t for t in batch_leaves(batch) if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]


def batch_bytes(batch: Any) -> int:
    """Bytes from the first to the last element of each tensor, those of a storage together at most as many as it has:
    what a batch is a slice of may be a whole data set.
    """
    found: dict[int, tuple[int, int]] = {}
    for t in {id(t): t for t in batch_leaves(batch) if isinstance(t, Tensor)}.values():
        if t.layout != torch.strided:
            found[-id(t)] = (sparse_bytes(t),) * 2 if t.layout == torch.sparse_coo else (t.nbytes,) * 2
            continue
        spanned = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        before = found.get(storage_id(t), (0, 0))[0]
        found[storage_id(t)] = before + spanned * t.itemsize * (t.numel() > 0), t.untyped_storage().nbytes()
    return sum(map(min, found.values()))


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, and what quantised parameters hold beside their values, such as scales."""
    for t in (*model.parameters(), *model.buffers()):
        if is_traceable_wrapper_subclass(t) and not t.is_nested:  # which has no memory of its own
            yield from (getattr(t, name) for name in t.__tensor_flatten__()[0])
            continue
        yield t
        if type(t) not in (Tensor, nn.Parameter):
            yield from _within(vars(t), 3)


def tensors_beside(model: nn.Module) -> list[Tensor]:
    """What modules hold that is neither parameter nor buffer, such as a memory of the last batch, in attributes,
    containers and plain objects there: a tensor of each storage.
    """
    own = {storage_id(t) for t in filter(_is_plain, model_tensors(model))}
    attributes = [value for m in model.modules() for name, value in vars(m).items() if name not in _OWN]
    objects = [vars(value) for value in tree_leaves(attributes) if _is_object(value)]
    found = {storage_id(t): t for t in filter(_is_plain, tree_leaves([attributes, objects]))}
    return [t for place, t in found.items() if place not in own]


class Beside:
    """The tensors beside a model as they are now, of which it holds none."""

    def __init__(self, model: nn.Module) -> None:
        storages = [t.untyped_storage() for t in tensors_beside(model)]
        self._found = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]

    def bytes_left(self) -> int:
        """Bytes of those that are still there."""
        return sum(size for ref, size in self._found if storage_behind(ref) is not None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_object(value: Any) -> bool:
    known = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, known)


def _within(value: Any, depth: int) -> Iterator[Tensor]:
    for inner in value.values():
        if isinstance(inner, Tensor):
            yield inner
        elif depth and hasattr(inner, "__dict__") and not isinstance(inner, type | nn.Module):
            yield from _within(vars(inner), depth - 1)


def buckets(model: nn.Module) -> int:
    """Bytes that `DistributedDataParallel` holds to reduce gradients in, from step to step."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return sum(bucket_bytes(wrapper.module) for wrapper in wrappers)


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in which a `DistributedDataParallel` around a model reduces its gradients."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _replica(wrapper: nn.Module, memo: dict[int, Any]) -> nn.Module:
    inner: nn.Module = copy.deepcopy(wrapper.module, memo)  # type: ignore[assignment, arg-type]
    inner.register_buffer("_buckets", torch.empty(buckets(wrapper), dtype=torch.uint8, device="meta"), persistent=False)
    return inner


class _WithoutData(TorchFunctionMode):
    """Copies of tensors are on the meta device."""

    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self._owned = owned
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.copy(*args)
        if func is Tensor.clone:  # what a parameter's copy is made of
            return self._meta_copy(args[0])
        return func(*args, **(kwargs or {}))

    def copy(self, t: Tensor, memo: dict[int, Any]) -> Any:
        """What `copy.deepcopy` gives of a tensor."""
        if id(t) not in memo and is_traceable_wrapper_subclass(t) and not t.is_nested:
            names, rest = t.__tensor_flatten__()  # as torchao's quantised weights, which hold others
            self._owned.update(id(getattr(t, name)) for name in names)
            parts = {name: self.copy(getattr(t, name), memo) for name in names}
            found = type(t).__tensor_unflatten__(parts, rest, t.shape, t.stride())
            memo[id(t)] = nn.Parameter(found, t.requires_grad) if isinstance(t, nn.Parameter) else found
        if id(t) not in memo:
            kept = t.dim() == 0 and t.device.type == "cpu" and id(t) not in self._owned
            found = t.detach().clone() if kept else self._meta_copy(t)
            found = found.requires_grad_() if t.requires_grad else found
            memo[id(t)] = found if type(t) is Tensor else found.as_subclass(type(t))
            memo[id(t)].__dict__.update(copy.deepcopy(t.__dict__, memo))  # which may lead back to it
            if not t.is_meta and not isinstance(t, nn.Parameter):
                memo[id(t)].__dict__[_ORIGINAL] = _Original(t)
        return memo[id(t)]

    def _meta_copy(self, t: Tensor) -> Tensor:
        if t.layout != torch.strided:
            return torch.empty_like(t, device="meta")
        storage = t.untyped_storage()
        meta_copy = self._storages.get(storage_id(storage))
        if meta_copy is None:
            meta_copy = self._storages[storage_id(storage)] = torch.UntypedStorage(storage.nbytes(), device="meta")
        found = torch.empty(0, dtype=t.dtype, device="meta")
        return found.set_(meta_copy, t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload, no-any-return]
