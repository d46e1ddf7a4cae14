"""Tensors that a forward makes on the CPU by name (`torch.zeros(n, n)`), while the meta device stands for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.pytree import tree_map
from ckptfused.compat.torch_dispatch import DispatchMode, schema_of, tensors_of, written_arguments
from ckptfused.compat.torch_memory import storage_id
from ckptfused.ops.fake import hold_surplus, surplus_of
from ckptfused.simulate.values import LENGTHS

LARGEST = 1 << 28
"""Entries of such a tensor above which it is made without data, like all others."""
aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")


class MadeByName(DispatchMode):
    """While it is active, such tensors are made as they are, for whoever looks at them or keeps them, and count as long
    as they live. Where one meets tensors without data, what stands for it shares its memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drew = False
        self.chose_by_chance = False
        """Whether a random number was looked at: whether a layer is dropped, say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of(args, kwargs)
        if func.overloadpacket is aten._to_copy and kwargs.get("device") not in (None, given[0].device):
            return _copied(func, given[0], kwargs)
        if not given and (large := _large(func, args, kwargs)) is not None:
            return large
        real = [t for t in given if t.is_cpu and t.layout == torch.strided]
        self._drew |= torch.Tag.nondeterministic_seeded in func.tags and len(real) == len(given)
        self.chose_by_chance |= self._drew and func.overloadpacket is aten._local_scalar_dense
        if real and len(real) < len(given) and func not in LENGTHS:
            args, kwargs = _met(func, args, kwargs)
        out = func(*args, **kwargs)
        if made := [t for t in tensors_of(out) if t.is_cpu and t.layout == torch.strided]:
            theirs = {storage_id(t) for t in real if not _is_counted(t) and func.overloadpacket is not aten.lift_fresh}
            for t in made:
                if storage_id(t) not in theirs:
                    _count(t)
        return out


def _is_counted(t: Tensor) -> bool:
    return hasattr(t.untyped_storage(), "surplus")


def _count(t: Tensor) -> None:
    """Has a tensor on the CPU count, as long as its memory is there."""
    more = t.untyped_storage().nbytes() - sum(held.nbytes for held in surplus_of(t))
    hold_surplus(t, [torch.empty(more, dtype=torch.uint8, device=_META)] if more > 0 else [])


def _can_meet(t: Tensor) -> bool:
    """Whether it needs a stand-in beside tensors without data: numbers do not."""
    return t.is_cpu and t.dim() > 0 and t.layout == torch.strided


def _stand_in(t: Tensor) -> Tensor:
    """A tensor without data that has the memory of t."""
    storage: Any = torch.UntypedStorage(0, device=_META)
    storage.surplus = surplus_of(t)
    return torch.empty(0, dtype=t.dtype, device=_META).set_(storage, t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload, no-any-return]


def _met(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an op, all without data. Into values without such nothing can be written: PyTorch refuses."""
    if any(t.is_cpu for t in written_arguments(func, args, kwargs)):
        return args, kwargs
    own = func.namespace == "ckptfused"  # whose integers are lengths, which the host reads

    def met(value: Any) -> Any:
        stands = isinstance(value, Tensor) and _can_meet(value) and not (own and not value.is_floating_point())
        return _stand_in(value) if stands else value

    return tree_map(met, (args, kwargs))


def _copied(func: Any, t: Tensor, kwargs: Any) -> Tensor:
    """A copy to the device where it is already."""
    same = kwargs.get("dtype") in (None, t.dtype)
    if t.is_meta:
        if same and not (t.requires_grad and torch.is_grad_enabled()):  # autograd gives a result a node of its own
            return t
        return aten.alias(t) if same else func(t, **{**kwargs, "device": _META})  # type: ignore[no-any-return]
    if not same:
        t = func(t, **{**kwargs, "device": _CPU})
        _count(t)
    return _stand_in(t)


def _large(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What an op makes on the CPU, without data, if that is too large."""
    takes_device = any(argument.name == "device" for argument in schema_of(func).arguments)
    if not takes_device or kwargs.get("device", _CPU) not in (None, _CPU):
        return None
    theirs = {name: None for name in ("generator", "pin_memory") if name in kwargs}
    try:
        out: Tensor = func(*args, **{**kwargs, **theirs, "device": _META})
    except (RuntimeError, NotImplementedError):
        return None
    return out if out.numel() > LARGEST else None
