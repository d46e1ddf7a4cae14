"""A model without its data: what it does to memory can be seen of it, and the model itself is left alone."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

T = TypeVar("T")


def meta_twin(model: nn.Module, optimizer: T) -> tuple[nn.Module, T]:
    """A copy of a model, and of what holds its parameters, on the meta device.

    Tensors that share a storage share one there; hooks, converted layers, adapters and checkpoints are those of the
    model. A number on the CPU that is neither parameter nor buffer stays one, for code that looks at it.
    **Raises** `ValueError` where a model cannot be copied, or its tensors are parts of distributed ones.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t).__name__ == "DTensor":
            raise ValueError(
                f"model: expected whole tensors, got {name}, a DTensor: predict the model before it is sharded"
            )
    owned = {id(t) for t in (*model.parameters(), *model.buffers())}
    try:
        with _WithoutData(owned):
            return copy.deepcopy((model, optimizer))
    except (TypeError, RuntimeError, AttributeError, NotImplementedError, SystemError) as error:
        raise ValueError(f"model: expected one that copy.deepcopy copies, got {error}") from error


def without_data(batch: T) -> T:
    """The same batch with tensors on the meta device; what is one tensor stays one."""
    made: dict[int, Tensor] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = value.detach().to("meta").requires_grad_(value.requires_grad)
        return made[id(value)]

    return tree_map(twin, batch)


class _WithoutData(TorchFunctionMode):
    """Copies of tensors are on the meta device."""

    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self._owned = owned
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            t, memo = args
            if id(t) not in memo:
                kept = t.dim() == 0 and t.device.type == "cpu" and id(t) not in self._owned
                found = t.detach().clone() if kept else self._twin(t)
                found = found.requires_grad_() if t.requires_grad else found
                found.__dict__.update(copy.deepcopy(t.__dict__, memo))
                if type(t) is not Tensor:
                    found = found.as_subclass(type(t))
                memo[id(t)] = found
            return memo[id(t)]
        if func is Tensor.clone:  # what a parameter's copy is made of
            return self._twin(args[0])
        return func(*args, **(kwargs or {}))

    def _twin(self, t: Tensor) -> Tensor:
        if t.layout != torch.strided:
            return torch.empty_like(t, device="meta")
        storage = t.untyped_storage()
        twin = self._storages.get(storage._cdata)
        if twin is None:
            twin = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        found = torch.empty(0, dtype=t.dtype, device="meta")
        return found.set_(twin, t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload, no-any-return]
