"""Writes in place to what a forward made itself: as a recording sees them, calls with a new result."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ckptfused.compat.torch_memory import storage_id
from ckptfused.models.derive.recording.names import words_of

RETURNING = words_of(
    "bfloat16 bool broadcast_to byte char contiguous double dropout expand flatten float half int long ravel reshape",
    "short type type_as view",
)
"""Calls that may return their argument as it is."""
_MAY_ALIAS = RETURNING | words_of(
    "to unflatten unsqueeze squeeze getitem chunk split narrow unbind select t T mT transpose permute swapaxes detach",
    "swapdims movedim expand_as view_as reshape_as diagonal real imag view_as_real view_as_complex split_with_sizes",
)
"""Calls whose result may lie in the memory of their argument, whether it does in a recording or not."""
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


def _with_item(t: Tensor, index: Any, value: Any) -> tuple[Tensor, Tensor]:
    """The tensor with other values in a part, and that part."""
    made = t.clone()
    made[index] = value
    return made, made[index]


def may_be_given(value: Any) -> bool:
    """Whether a value may lie in the memory of what the layer was given or holds: at other strides, say."""
    while value.call is not None and value.op in _MAY_ALIAS and value.call.inputs:
        value = value.call.inputs[0]
    return value.call is None


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
