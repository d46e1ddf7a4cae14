"""What PyTorch's allocator of host memory hands out to one thread, true of PyTorch 2.11 to 2.13.

`torch.profiler` ends the process where two threads profile; the one before it looks at its own thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocations(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """A function's result, and the bytes of each allocation and, below 0, release during its call, in order.

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
