"""Memory of tensors: identities of storages, copy-on-write, local parts. PyTorch 2.11 to 2.13 have every name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def storage_id(t: Tensor | torch.UntypedStorage) -> int:
    """A number that no two storages alive have in common; also of those without memory. `UntypedStorage._cdata`."""
    return (t.untyped_storage() if isinstance(t, Tensor) else t)._cdata


def is_cow(t: Tensor) -> bool:
    """Whether a tensor's memory is another's until one of them is written to. `_is_cow_tensor`."""
    return torch._C._is_cow_tensor(t)  # type: ignore[attr-defined]


def is_view(t: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. `_is_view`."""
    return t._is_view()


def local_tensor(t: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is. `_local_tensor`."""
    return getattr(t, "_local_tensor", t)


def sparse_bytes(t: Tensor) -> int:
    """What a sparse tensor, coalesced or not, takes. `_indices`, `_values`."""
    return t._indices().nbytes + t._values().nbytes
