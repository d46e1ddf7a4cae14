"""Calls of a layer made again from its recording: what it makes of arguments and buffers alone, which layers share, and
what stands beside a half that is fused."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten, tree_map
from ckptfused.eager.dropout import dropout
from ckptfused.models.derive.recording.recorder import Recorded, Value

NOTHING: Mapping[Value, Recorded] = MappingProxyType({})
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


def evaluated(
    value: Value,
    given: Callable[[str], Any],
    device: torch.device,
    known: dict[Value, Tensor] | None = None,
    returned: Mapping[Value, Recorded] = NOTHING,
    drops: bool = False,
) -> Tensor:
    """A value that depends on arguments, buffers, numbers and `known` alone, by the calls that made it. returned: what
    calls of modules returned, which are made as such. drops: `known` is this call's own, and loses what was read last.
    **Raises** `RuntimeError` where a module returns something else.
    """
    known = {} if known is None else known

    def made(v: Any) -> Any:
        if isinstance(v, Value):
            return known[v] if v in known else given(v.name)
        return device if isinstance(v, torch.device) or (type(v) is str and v == "meta") else v

    calls = calls_behind([value], known, returned)
    last = {v: call for call in calls for v in call.inputs} if drops else {}
    for call in calls:
        known.update(zip(call.values, _results(call, made, given), strict=True))
        for v in (*call.values, *call.inputs) if drops else ():
            if v is not value and last.get(v, call) is call:
                known.pop(v, None)
    return made(value)  # type: ignore[no-any-return]


def _results(call: Recorded, made: Callable[[Any], Any], given: Callable[[str], Any]) -> list[Tensor]:
    args, kwargs = tree_map(made, (call.args, call.kwargs))
    with nullcontext() if call.modes is None else call.modes.on():
        if call.mask is not None:
            found = [dropout(tree_flatten((args, kwargs))[0][0], call.mask, call.given(1, "p", 0.5))]
        else:
            y = (given(call.op) if call.func is None else call.func)(*args, **kwargs)
            found = [t for t in tree_flatten(y)[0] if isinstance(t, Tensor)]
    if len(found) != len(call.values):
        raise RuntimeError(f"{call.op} gave {len(found)} tensors, expected {len(call.values)} as when it was read")
    return found


def calls_behind(
    values: Iterable[Value], known: Container[Value | None] = (), returned: Mapping[Value, Recorded] = NOTHING
) -> list[Recorded]:
    """The calls by which values are made of known ones, in order: a module may write to what it takes. returned: as in
    `evaluated`.
    """
    found: dict[Recorded, None] = {}
    queue = [*values]
    while queue:
        v = queue.pop()
        call = None if v in known else returned.get(v, v.call)
        if call is not None and call not in found:
            found[call] = None
            queue += call.inputs
    return sorted(found, key=lambda call: call.number)


class Rest(NamedTuple):
    """What a layer does before or after the half that is fused: its own calls and those of its modules."""

    first: bool
    """Whether it is before that half."""
    start: Value
    """What it is made of: the layer's input, or what that half makes."""
    end: Value
    given: tuple[str, ...]
    """What it takes beside `start`: arguments, and tensors that the layer itself holds."""
    returned: Mapping[Value, Recorded]
    modules: frozenset[str]
    """The modules that are called in it alone."""
    scales: bool = False
    """Whether it is one product with what the layer holds beside parameters (Gemma 4)."""

    def run(self, layer: nn.Module, x: Tensor, *given: Tensor) -> Tensor:
        """What it makes of x. given: in the order of `given`."""
        tensors = dict(zip(self.given, given, strict=True))

        def held(name: str) -> Any:
            kind, _, path = name.partition(":")
            return layer.get_submodule(path) if kind == "module" else tensors[name]

        return evaluated(self.end, held, x.device, {self.start: x}, self.returned, drops=True)


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
