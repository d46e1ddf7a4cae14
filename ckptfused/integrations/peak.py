"""The memory of a training step that somebody else runs, measured from its begin to its end."""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_autograd import is_profiled
from ckptfused.compat.torch_memory import local_tensor
from ckptfused.profiler.allocator import AllocatorLog, CPUAllocator
from ckptfused.profiler.optimizer_step import state_tensors


class PeakMeter:
    """Measures what is allocated at the peak of a step, from now on.

    On a GPU it reads the allocator's own peak since the process began, or since `torch.cuda.reset_peak_memory_stats`,
    at no cost. On a CPU, which has no such number, it runs the step under PyTorch's profiler: weights, gradients and
    the optimizer's state as they are now, and what is allocated from then on. What of the former is released counts
    until then if it was made in a step that was measured, else to the end. Not while another profiler is at work.

    buckets: bytes of those of a `DistributedDataParallel`, for the CPU.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, buckets: int = 0) -> None:
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._stack = contextlib.ExitStack()
        self._trace: AllocatorLog | None = None
        if self._device.type == "cpu" and not is_profiled():
            held = state_storages(model, optimizer)
            self._held = sum(held.values()) + buckets
            self._trace = self._stack.enter_context(CPUAllocator().recording())
            self._trace.begins_with(held)

    def ends(self) -> int | None:
        """Bytes at the peak; None where nothing was measured."""
        self._stack.close()
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._trace is None:
            return None
        return self._held + max(itertools.accumulate(c.size for c in self._trace.changes), default=0)


def state_storages(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Storages of weights, buffers, gradients and the optimizer's state, in bytes, by their addresses."""
    weights = list(model.parameters())
    kept = [] if optimizer is None else state_tensors(optimizer)
    tensors = [*weights, *model.buffers(), *(p.grad for p in weights), *kept]
    own = [local_tensor(t) for t in tensors if isinstance(t, Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if not t.is_meta}
