"""What a layer makes of its arguments and buffers alone, before it meets x: made once and shared by layers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.pytree import tree_flatten, tree_map
from ckptfused.models.derive.recorder import Value

_MOST = 64
_MADE: OrderedDict[Hashable, tuple[Any, ...]] = OrderedDict()


def once(of: tuple[Tensor, ...], what: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes of these tensors: the same tensor again, as long as it lives and they are as they were."""
    key = (what, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(id, of))
    versions = tuple(0 if t.is_inference() else t._version for t in of)
    if key in _MADE:
        refs, were, made = _MADE[key]
        found = made()
        if found is not None and were == versions and all(ref() is t for ref, t in zip(refs, of, strict=True)):
            return found  # type: ignore[no-any-return]
    found = make()
    _MADE[key] = (tuple(map(weakref.ref, of)), versions, weakref.ref(found))
    _MADE.move_to_end(key)
    if len(_MADE) > _MOST:
        _MADE.popitem(last=False)
    return found


def joined_masks(masks: Iterable[tuple[Tensor, str]], dtype: torch.dtype) -> Tensor:
    """Several masks as one that is added. **Shapes** each broadcastable to [B, H, T, T]."""
    first, *rest = (t.to(dtype) if kind == "add" else _added(t if kind == "keep" else ~t, dtype) for t, kind in masks)
    return sum(rest, first)


def _added(keep: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=keep.device).where(keep, -torch.inf)


def evaluated(value: Value, given: Callable[[str], Tensor], device: torch.device) -> Tensor:
    """A value that depends on arguments, buffers and numbers alone, by the calls that made it."""
    if value.call is None:
        return given(value.name)
    call = value.call

    def made(v: Any) -> Any:
        if isinstance(v, Value):
            return evaluated(v, given, device)
        return device if isinstance(v, torch.device) or v == "meta" else v

    args, kwargs = tree_map(made, (call.args, call.kwargs))
    found = [t for t in tree_flatten(call.func(*args, **kwargs))[0] if isinstance(t, Tensor)]
    return found[value.index]


def recalled(value: Value, given: Callable[[str], Tensor], device: torch.device) -> Tensor:
    """`evaluated`, made once for the same tensors."""
    roots: dict[str, Tensor] = {}
    queue = [value]
    while queue:
        v = queue.pop()
        if v.call is None:
            roots[v.name] = given(v.name)
        else:
            queue += v.call.inputs
    return once(tuple(roots.values()), (value, device), lambda: evaluated(value, roots.__getitem__, device))
