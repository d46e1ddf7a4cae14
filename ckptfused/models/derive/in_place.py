"""Writes in place to what a forward made itself: as a recording sees them, calls with a new result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfused.models.derive.recorder import Value

_AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")


def writes(op: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a tensor that it is given."""
    named_so = op in _AUGMENTED or op == "setitem" or op.endswith("_")
    return named_so or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def without_writing(op: str) -> str:
    """The call that computes the same and writes nothing."""
    return op[1:] if op in _AUGMENTED else op.rstrip("_")


def let_go(target: Value, known: Iterable[Value]) -> bool:
    """Keeps what a value was before a call writes to its tensor. False where that may be seen elsewhere: the layer did
    not make the tensor, or another value is a view of it.
    """
    storage = target.data.untyped_storage()._cdata
    if target.call is None or any(v is not target and v.data.untyped_storage()._cdata == storage for v in known):
        return False
    target.data = target.data.detach().clone()
    return True
