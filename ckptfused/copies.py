"""Copies of a call's tensors that share their memory until one of the two is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckptfused.arguments import Arguments

_is_cow: Callable[[Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]


def is_plain(t: Tensor) -> bool:
    """Whether t is a view of a storage, and nothing else."""
    ordinary = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_nested
    return ordinary and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def copy_on_write(t: Tensor) -> Tensor:
    """A tensor with the values and the gradient of t, which shares its memory until one of the two is written."""
    if not torch.compiler.is_compiling() and is_plain(t):  # Dynamo does not know the operation
        try:
            return torch._lazy_clone(t)
        except (RuntimeError, NotImplementedError):  # memory that PyTorch did not allocate
            pass
    return t.clone()


class Shared:
    """The caller's tensors that come to share memory with copies.

    In that state `Tensor.record_stream` does nothing, and `Tensor.data_ptr` makes the copy. It ends, without one, by
    asking for the pointer when no copy is left.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.own = [t if is_plain(t) and not _is_cow(t) else None for t in tensors]
        self.copies: list[StorageWeakRef] = []

    def copy(self, tensors: list[Tensor]) -> list[Tensor]:
        copies = [copy_on_write(t) for t in tensors]
        self.own = [t if t is not None and _is_cow(t) else None for t in self.own]
        self.copies = [
            StorageWeakRef(copy.untyped_storage()) for t, copy in zip(self.own, copies, strict=True) if t is not None
        ]
        return copies

    def end(self) -> None:
        for t, copy in zip((t for t in self.own if t is not None), self.copies, strict=True):
            if copy.expired():
                t.data_ptr()


def share_memory(tensors: list[Tensor]) -> bool:
    storages = [t.untyped_storage()._cdata for t in tensors if is_plain(t)]
    return len(set(storages)) < len(storages)


class Aliases:
    """Refuses a write to an argument that another one would have seen, had the function worked on the caller's own."""

    def __init__(self, inputs: Arguments, tensors: list[Tensor], copies: list[Tensor]) -> None:
        self.inputs = inputs
        self.tensors, self.copies = list(tensors), list(copies)
        self.versions = [_version(t) for t in copies]

    def check(self) -> None:
        written = [_version(t) != version for t, version in zip(self.copies, self.versions, strict=True)]
        for i, j in itertools.permutations(range(len(self.tensors)), 2):
            if written[i] and _overlap(self.tensors[i], self.tensors[j]):
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function changes {self.inputs.name(i)} in place, which shares memory "
                    f"with {self.inputs.name(j)}; each is a copy of its own there. Give the function one of the two, "
                    "and take the other from it inside"
                )


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if not (is_plain(a) and is_plain(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata):
        return False
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
