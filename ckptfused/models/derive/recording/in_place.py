"""Writes in place to what a forward made itself: as a recording sees them, calls with a new result."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ckptfused.compat.torch_memory import storage_id

_AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")


def writes(op: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a tensor that it is given."""
    named_so = op in _AUGMENTED or op == "setitem" or op.endswith("_")
    return named_so or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def without_writing(op: str) -> str:
    """The call that computes the same and writes nothing."""
    return op[1:] if op in _AUGMENTED else op.rstrip("_")


def function_without_writing(func: Any, op: str) -> Any:
    """The function of that call; the one that was called where there is none, or where it is told by an argument. Its
    result has the type of what would be written to.
    """
    if op == "setitem":
        return _with_item
    plain = getattr(Tensor, op, None)
    if plain is None or not getattr(func, "__name__", "").endswith("_"):
        return func

    @functools.wraps(plain)
    def apart(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(t, *args, **kwargs).to(t.dtype)  # type: ignore[no-any-return]

    return apart


def _with_item(t: Tensor, index: Any, value: Any) -> Tensor:
    made = t.clone()
    made[index] = value
    return made


def let_go(target: Any, known: dict[int, Any], every: Iterable[Any]) -> bool:
    """Keeps what a recording's values were before a call writes to their storage, and knows no view of it any more: who
    uses one later uses what no call made that was seen. False where somebody else sees the write.
    """
    storage = storage_id(target.data)
    written = [v for v in every if storage_id(v.data) == storage]
    if any(v.call is None for v in written):
        return False
    for v in written:
        if id(v.data) in known and known[id(v.data)] is v:
            del known[id(v.data)]
        v.data = v.data.clone()
    return True
