"""Copies of a call's tensors that share the caller's memory until they are written."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.compat import pytree
from ckptfused.compat.torch_dispatch import dispatch_modes, in_dispatch_mode, is_transformed, without_dispatch_modes
from ckptfused.compat.torch_memory import storage_id
from ckptfused.recompute.arguments import HeldArgs


def is_plain_view(t: Tensor) -> bool:
    """Whether t is a view of a storage, and nothing else."""
    return type(t) in (Tensor, nn.Parameter) and is_view_of_storage(t)


def is_view_of_storage(t: Tensor) -> bool:
    """Whether t is that for the dispatcher: plain, or a parameter of a class that Python alone knows (bitsandbytes'
    codes)."""
    plain = type(t) in (Tensor, nn.Parameter)
    if not plain and not (isinstance(t, nn.Parameter) and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__):
        return False
    return t.layout == torch.strided and not t.is_nested and not is_transformed(t)


def clone(t: Tensor) -> Tensor:
    """A copy of t with its attributes."""
    return _with_attributes(t.clone(), t)


def _with_attributes(copy: Tensor, t: Tensor) -> Tensor:
    for name, value in vars(t).items():
        vars(copy).setdefault(name, value)  # a subclass's copy has what it is made of
    return copy


class CopiesOnWrite:
    """Copies of tensors, each over the original's memory until it is written; then it has memory of its own.

    An original is only read, so other threads may use it meanwhile. When the sharing ends (with this object), a copy
    that is still there and was not written gets memory of its own: nothing outlives it that shares the originals'
    memory. Tensors that cannot share theirs (subclasses, sparse, nested, of other devices than CPU and CUDA) are copied
    at once.
    """

    def __init__(self) -> None:
        self._made = _C.CopiesOnWrite()
        self.original: Callable[[Any], Any] = self._made.original
        """The tensor that a copy was made of, if that copy is as it was made; anything else as it is."""
        self.forget = self._made.forget
        """After a replay, which saves `original` of what it saves: the originals are then free."""

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors with the values and the gradients of these."""
        originals = list(tensors)
        if in_dispatch_mode():
            with unseen_by_modes():
                return self._of(originals)
        return self._of(originals)

    def _of(self, originals: list[Tensor]) -> list[Tensor]:
        copies, unfinished = self._made.make(originals)
        for i in unfinished:
            t = originals[i]
            copies[i] = clone(t) if copies[i] is None else _with_attributes(copies[i], t)
        return copies

    def settle(self, result: Any) -> Any:
        """The result of a function on copies, with originals in the place of untouched copies. A leaf's copy stays: it
        may be written to where the leaf may not."""
        if not self._made.any_left():
            return result
        if isinstance(result, Tensor):
            return self._handed_back(result)
        leaves, structure = pytree.tree_flatten(result)
        originals = [self._handed_back(leaf) for leaf in leaves]
        if all(new is old for new, old in zip(originals, leaves, strict=True)):
            return result
        return pytree.tree_unflatten(originals, structure)

    def _handed_back(self, value: Any) -> Any:
        original = self.original(value)
        is_leaf = original is not value and original.is_leaf and original.requires_grad
        return value if is_leaf else original


def unseen_by_modes() -> AbstractContextManager[Any]:
    """A context that no dispatch mode sees into, such as selective checkpointing's, which counts operations: these are
    not the function's. PyTorch's own modes for tracing do see it."""
    modes = dispatch_modes()
    if modes and not any(mode.is_infra_mode() for mode in modes):
        return without_dispatch_modes()
    return nullcontext()


def storage_of(t: Tensor) -> int:
    """What tells the memory of one view of a storage from another's; for others, what tells the tensors."""
    return storage_id(t) if is_view_of_storage(t) else id(t)


def write_count(t: Tensor) -> int | None:
    """The number of writes to t that autograd knows; None for a tensor made in inference mode."""
    try:
        return t._version
    except RuntimeError:
        return None


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether two of the tensors lie in one storage."""
    return len(tensors) > 1 and _C.share_memory(tensors)


class Aliases:
    """Refuses a write to an argument that another one would have seen, had the function worked on the caller's own."""

    def __init__(self, inputs: HeldArgs, tensors: list[Tensor], copies: list[Tensor]) -> None:
        self.inputs = inputs
        self.tensors, self.copies = list(tensors), list(copies)
        self.versions = [write_count(t) for t in copies]

    def check(self) -> None:
        """**Raises** `RuntimeError` naming the two arguments."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i, t in enumerate(self.tensors):
            if is_plain_view(t):
                groups[storage_id(t)].append(i)
        for group in groups.values():
            for i, j in itertools.permutations(group, 2):
                if write_count(self.copies[i]) != self.versions[i] and _overlap(self.tensors[i], self.tensors[j]):
                    raise RuntimeError(
                        f"ckptfused.checkpoint: the function changes {self.inputs.name(i)} in place, which shares "
                        f"memory with {self.inputs.name(j)}; each is a copy of its own there. Give the function one "
                        "of the two, and take the other from it inside"
                    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one storage have a byte in common."""
    spans = [_span(t) for t in (a, b)]
    if max(start for start, _ in spans) >= min(stop for _, stop in spans):
        return False
    if a.element_size() != b.element_size():
        return True
    first = a.storage_offset() if spans[0][0] < spans[1][0] else b.storage_offset()
    used = torch.zeros(max(stop for _, stop in spans) // a.element_size() - first, dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of the storage between the first and the last element."""
    first = int(t.storage_offset())
    last = first + sum(int(size - 1) * int(stride) for size, stride in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (last + 1 if t.numel() else first) * t.element_size()
