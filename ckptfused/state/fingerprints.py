"""Checksums of values: equal bits have equal ones, and no copy of the values stays."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import without_dispatch_modes
from ckptfused.compat.torch_memory import is_cow, local_tensor

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_ROW = 512
_WORDS = (torch.int64, torch.int32, torch.uint8)


@dataclass(eq=False)
class _Sum:
    """A checksum that a device other than the CPU has yet to say."""

    pending: Tensor | None
    value: tuple[float, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sum) and self.value == other.value


@dataclass
class Fingerprints:
    """Makes fingerprints. Those of tensors on other devices than the CPU can be compared after `settle`."""

    _sums: list[_Sum] = field(default_factory=list)

    def of(self, value: Any) -> tuple[Any, ...]:
        """Fingerprints of a tensor or of all leaves of a pytree; what is neither a tensor nor a plain value does not
        count.
        """
        with torch.no_grad(), without_dispatch_modes():
            return tuple(self._leaf(leaf) for leaf in leaves(value))

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if not isinstance(value, _VALUES):
                return type(value).__name__
            return value if value == value else repr(value)  # no number at all equals not even itself
        t = local(value)
        if t is None:
            return tuple(value.shape), value.dtype, *map(self._leaf, _parts(value))
        if t.is_meta:
            return tuple(value.shape), value.dtype
        return tuple(t.shape), t.dtype, self._of_cpu(t) if t.is_cpu else self._elsewhere(t)

    def _of_cpu(self, t: Tensor) -> int:
        if is_cow(t):  # a pointer to its values would be a write
            t = t.clone()
        values = _integers(t)
        # NumPy would never again let its storage be resized, as FSDP does with gathered weights.
        return zlib.crc32((ctypes.c_ubyte * values.numel()).from_address(values.data_ptr()))

    def _elsewhere(self, t: Tensor) -> _Sum:
        """Without waiting for the device: sums over rows and over columns, each with its place as a factor."""
        flat = _integers(t)
        words = next(kind for kind in _WORDS if flat.numel() % kind.itemsize == 0)
        flat = (flat.clone() if flat.storage_offset() % words.itemsize else flat).view(words)
        rows = flat.new_zeros(-(-max(flat.numel(), 1) // _ROW), _ROW)
        rows.view(-1)[: flat.numel()] = flat
        sums = [_weighted(torch.hash_tensor(rows, dim=dim).view(torch.int64)) for dim in (0, 1)]
        found = _Sum(torch.stack(sums))
        self._sums.append(found)
        return found

    def sizes(self, value: Any) -> tuple[tuple[torch.dtype, _Sum], ...]:
        """The sum and the norm of each tensor of floating point, by which values that differ can be told how far."""
        with torch.no_grad(), without_dispatch_modes():
            found = [t for t in map(local, tensors(value)) if t is not None and t.is_floating_point() and not t.is_meta]
            return tuple((t.dtype, self._size(t)) for t in found if t.itemsize > 1)  # no norms of 8 bits

    def _size(self, t: Tensor) -> _Sum:
        norm = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
        found = _Sum(torch.stack([t.sum(dtype=torch.float64), norm.double()]))
        self._sums.append(found)
        return found

    def settle(self) -> None:
        """Waits for the devices."""
        for found in self._sums:
            if found.pending is not None:
                found.value, found.pending = tuple(found.pending.tolist()), None
        self._sums.clear()


class ContentHash:
    """A hash of a mask or table by which a layer is read, equal to those of tensors that hold the same, bit for bit; of
    one without data, to those of its shape. No copy of it is held."""

    __slots__ = ("_key",)

    def __init__(self, t: Tensor) -> None:
        held: object = None
        if not t.is_meta:
            held = object()  # a sparse one is equal to nothing
            if t.layout == torch.strided:
                with without_dispatch_modes():
                    # Of a copy: a storage that NumPy has seen cannot be resized, as FSDP's are.
                    values = t.detach().clone().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                held = hashlib.sha256(values.tobytes()).digest()
        self._key = t.shape, t.dtype, held

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContentHash) and self._key == other._key


def leaves(value: Any) -> list[Any]:
    """Leaves of a pytree, dataclasses such as Hugging Face's outputs included."""
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass of somebody's own, which no pytree knows."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)


def batch_leaves(batch: Any) -> Iterator[Any]:
    """What is in the containers of a batch, and in dataclasses of somebody's own."""
    for value in tree_leaves(batch):
        if is_record(value):
            yield from batch_leaves([getattr(value, part.name) for part in dataclasses.fields(value)])
        else:
            yield value


def local(t: Tensor) -> Tensor | None:
    """The values of a tensor that lie here; None of a kind that has no such, or whose memory was given back (FSDP1's
    views of weights that are in shards just now)."""
    if (own := local_tensor(t)) is not t:  # a DTensor
        return local(own)
    if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_nested or t.is_quantized:
        return local(t.data) if isinstance(t, nn.Parameter) and type(t.data) is Tensor else None
    try:
        storage = t.untyped_storage()
    except NotImplementedError:  # under torch.func
        return None
    given_back = t.numel() > 0 and storage.nbytes() < (t.storage_offset() + 1) * t.element_size()
    return None if given_back else t.detach()


def tensor_values(t: Tensor) -> Tensor | None:
    """The values of a tensor that lie here, of a sparse one those of the dense one; None of a kind that has no such."""
    return local(t.detach().to_dense() if t.layout != torch.strided and not t.is_nested else t)


def _parts(t: Tensor) -> list[Tensor]:
    """The tensors that hold the values of one that is no plain one; none where they cannot be had."""
    if t.layout == torch.sparse_coo:
        t = t.detach().coalesce()
        return [t.indices(), t.values()]
    if t.layout == torch.sparse_csr:
        return [t.crow_indices(), t.col_indices(), t.values().detach()]
    if hasattr(t, "__tensor_flatten__"):  # jagged tensors, and weights that libraries quantise
        return [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [t.int_repr()] if t.is_quantized else []


def _integers(t: Tensor) -> Tensor:
    return t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, 2 * sums.numel(), 2, device=sums.device)).sum()


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bits."""
    return bool(torch.equal(_integers(a.detach()), _integers(b.detach())))


def tensors(value: Any) -> Iterable[Tensor]:
    """The tensors of a pytree."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which nothing that is computed has a graph, or is seen by a mode."""
    with torch.no_grad(), without_dispatch_modes():
        yield
