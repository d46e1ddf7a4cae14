"""What tensors and devices tell of their memory, and processors of themselves. PyTorch 2.11 to 2.13 have every name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef


def storage_id(t: Tensor | torch.UntypedStorage) -> int:
    """A number that no two storages alive have in common; also of those without memory. `UntypedStorage._cdata`."""
    return (t.untyped_storage() if isinstance(t, Tensor) else t)._cdata


def storage_behind(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """What a weak reference stands for; None once it has ended. `UntypedStorage._new_with_weak_ptr`."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # type: ignore[attr-defined]


def copy_on_write(t: Tensor) -> Tensor:
    """A tensor over another's memory until one of them is written to. `_lazy_clone`."""
    return torch._lazy_clone(t)


def is_cow(t: Tensor) -> bool:
    """Whether a tensor's memory is another's until one of them is written to. `_is_cow_tensor`."""
    return torch._C._is_cow_tensor(t)  # type: ignore[attr-defined]


def storage_address(t: Tensor) -> int:
    """Where the memory of a tensor begins; asked so, a copy on write stays one. `_data_address`."""
    return torch._C._data_address(t)  # type: ignore[attr-defined]


def is_view(t: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. `_is_view`."""
    return t._is_view()


def local_tensor(t: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is. `_local_tensor`."""
    return getattr(t, "_local_tensor", t)


def sparse_parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """Places and entries of a sparse tensor, coalesced or not. `_indices`, `_values`."""
    return t._indices(), t._values()


def sparse_bytes(t: Tensor) -> int:
    """What a sparse tensor, coalesced or not, takes."""
    return sum(part.nbytes for part in sparse_parts(t))


def allocations(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """A function's result, and the bytes of each allocation and, below 0, release during its call, in order.

    `torch.profiler` ends the process where two threads profile; the one before it looks at its own thread alone.
    **Raises** `RuntimeError` where this thread is profiled already.
    """
    profiler: Any = torch.autograd
    options = torch._C._profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, options)
    profiler._enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return result, [event.cpu_memory_usage() for event in events]


def cpu_has_amx() -> bool:
    """Whether the processor has matrix products in bfloat16. `torch.cpu._is_amx_tile_supported`."""
    return torch.cpu._is_amx_tile_supported()


def record_allocations(on: bool) -> None:
    """Has CUDA's allocator note what it does, without stacks, or no longer. `_record_memory_history`."""
    if on:
        torch.cuda.memory._record_memory_history(context=None)
    else:
        torch.cuda.memory._record_memory_history(None)


def recorded_allocations(device: torch.device) -> Any:
    """What it noted: events with `action`, `addr`, `size`. `_snapshot`."""
    return torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
