"""What was found out of a module that says its own parts, for as long as nothing of it has changed.

A call of a small block takes longer to ask what its modules are than to compute. So the first call looks at the tree of
them (`_C.ModuleGuard`): classes and their versions, which change when an attribute of a class does, and the entries of
every `__dict__`. Where a later call finds all of it as it was, the layer is what it was, and its tensors are where they
were. Neither a module nor a tensor is kept: what is remembered says what the tree looks like, and whatever looks so is
the same layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ckptfused._extension import _C
from ckptfused.layer.facts import LayerFacts, LayerKey, elsewhere, facts_of
from ckptfused.layer.parts import Reason

_UNREAD = {"_non_persistent_buffers_set", "_read"}
"""Attributes that no reading of a layer asks for: what state_dict leaves out, and the tables that a RotaryTable met."""


class _Seen(NamedTuple):
    guard: Any
    """A `_C.ModuleGuard`."""
    key: LayerKey


_seen: WeakKeyDictionary[nn.Module, dict[torch.dtype, _Seen]] = WeakKeyDictionary()


def remembered_facts(module: Any, dtype: torch.dtype) -> LayerFacts | Reason:
    """`facts_of` the parts of a module as they are now. dtype: of x.

    module: one that says its `parts`, for which it reads itself, its children and their classes alone.
    Reasons are not remembered, nor is anything of modules with hooks, or of those that hold what is neither PyTorch's
    nor ours: such a layer is read at every call.
    """
    if torch.compiler.is_compiling():
        return _read(module, dtype)
    before = _seen.get(module, _NOTHING).get(dtype)
    if before is not None:
        slots = before.guard.tensors(module)
        if slots is not None:
            return elsewhere(before.key.attn is not None) or LayerFacts(before.key, slots)
    guard = _C.ModuleGuard(_UNREAD)
    known = guard.look(module)  # before it is read: what changes meanwhile is seen by `place`
    facts = _read(module, dtype)
    if known and isinstance(facts, LayerFacts) and guard.place(module, facts.slots):
        _seen.setdefault(module, {})[dtype] = _Seen(guard, facts.key)
    return facts


_NOTHING: dict[torch.dtype, _Seen] = {}


def _read(module: Any, dtype: torch.dtype) -> LayerFacts | Reason:
    parts = module.parts()
    return parts if isinstance(parts, Reason) else facts_of(parts, dtype)
