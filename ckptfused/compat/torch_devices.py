"""What devices tell of themselves. PyTorch 2.11 to 2.13 have every name."""

from __future__ import annotations

from typing import Any

import torch


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
