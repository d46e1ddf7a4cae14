"""What ops take on the CPU at hand: each is run alone, once for all of its kind, on tensors like its own.

Beside that an op waits for operands that the processor's cache has lost, and for Python, modules and autograd to call
it. Both are rates that are measured, of memory and of a small model.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.compat.torch_dispatch import DispatchMode
from ckptfused.simulate.alone import OpCall
from ckptfused.simulate.scratch import Scratch
from ckptfused.triton.problem import accumulation_type

_ATEN: Any = torch.ops.aten
_OPS: Any = torch.ops.ckptfused

CALLS = 5
"""Calls of an op after a first one; the least of their times counts."""
LONGEST, LARGEST = 0.05, 1 << 30
"""Seconds and bytes above which an op is not run: there its FLOPs or its bytes say enough."""


class _Asked(threading.local):
    timed = True


_asked = _Asked()


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """A context in which this thread's predictions take times by the roofline: nothing runs for its time alone."""
    before, _asked.timed = _asked.timed, False
    try:
        yield
    finally:
        _asked.timed = before


class CpuTimings:
    """The CPU with so many threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.cache = _cache_size("SC_LEVEL3_CACHE_SIZE", 32 << 20)
        """Bytes of the largest."""
        self.scratch = Scratch()
        self.whole_layers: dict[Hashable, Any] = {}
        """What layers hold that are measured as one, recurrent ones say, by kind of call."""
        self._known: dict[Hashable, float | None] = {}
        self._others = torch.ones(2 * threads * _cache_size("SC_LEVEL2_CACHE_SIZE", 1 << 20) // 4)
        """What other ops leave in the caches of single cores."""
        self.memory = self._memory()
        """Bytes/s of operands that are not in the cache, beside what the op takes anyhow."""
        self.calls = _calls()
        """Seconds to call an op: from modules, with a graph; and from autograd or a loop, without."""

    def seconds(self, function: Callable[..., Any], args: Any, kwargs: Any = None) -> float | None:
        """Seconds of one call; None: it cannot be run alone, or is not to be."""
        call = OpCall(function, args, kwargs)
        if call.kind not in self._known and not _asked.timed:
            return None
        if call.kind not in self._known:
            self._known[call.kind] = self._timed(call)
        return self._known[call.kind]

    def _timed(self, call: OpCall) -> float | None:
        times = []

        def observed(function: Callable[[], Any]) -> None:
            for _ in range(1 + CALLS):
                self._others.sum()  # not written: a checkpoint may watch what its function writes
                times.append(_taken(function))

        return min(times[1:]) if call.run(observed) else None

    def _memory(self) -> float:
        """Seconds a byte of an op in place on what is far larger than the cache, less its time within the cache."""
        large = torch.ones(self.cache)  # four times the cache
        small = large[: self.cache // 16]
        excess = _least(lambda: large.mul_(1.0)) - large.numel() / small.numel() * _least(lambda: small.mul_(1.0))
        return large.nbytes / max(excess, 1e-9)


class _Layer(nn.Module):
    """A layer as models are written: a norm of single ops, linear maps, an activation, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(1, 1), nn.Linear(1, 1)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(self.activation(self.up(y)))


class _Counted(DispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def _calls() -> tuple[float, float]:
    """Seconds of ops on next to nothing, in a model of such."""
    model, x = nn.Sequential(*(_Layer() for _ in range(8))), torch.ones(1, 1)
    forward, backward = [], []
    for _ in range(4 * CALLS):
        forward.append(_taken(lambda: model(x)))
        loss = model(x)
        backward.append(_taken(loss.backward))
    with _Counted() as calls:
        loss = model(x)
    with _Counted() as back:
        loss.backward()
    return min(forward) / calls.ops, min(backward) / back.ops


class Cache:
    """Which storages a cache of so many bytes holds: those that were used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[Hashable, int] = OrderedDict()
        self._bytes = 0

    def missed(self, read: Mapping[Hashable, int], written: Mapping[Hashable, int]) -> int:
        """Bytes of what an op reads that are not there. What it writes is there afterwards; an op that uses more than
        there is room for was timed so, and misses nothing more."""
        used = {**written, **read}
        missed = sum(size for key, size in read.items() if key not in self._held)
        for key, size in used.items():
            self._bytes += size - self._held.pop(key, 0)
            self._held[key] = size
        while self._bytes > self._size and self._held:
            self._bytes -= self._held.popitem(last=False)[1]
        return missed if sum(used.values()) <= self._size else 0


def product(a: Tensor, b: Tensor) -> Tensor:
    """A block's, which is not by PyTorch's library everywhere."""
    out = a.new_empty(a.size(0), b.size(1))
    _C.matmul_out(out, a, b, False)
    return out


def attention_forward(q: Tensor, k: Tensor, causal: bool) -> Any:
    """PyTorch's on the CPU, with k in the place of v."""
    k = _heads(k, q.size(-3))
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, causal)


def attention_backward(q: Tensor, k: Tensor, causal: bool) -> Any:
    """Its backward, of a log-sum-exp of zeros."""
    k, lse = _heads(k, q.size(-3)), q.new_zeros(q.shape[:-1], dtype=accumulation_type(q.dtype))
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(q, q, k, k, q, lse, 0.0, causal)


def _heads(k: Tensor, heads: int) -> Tensor:
    return k if k.size(-3) == heads else k.repeat_interleave(heads // k.size(-3), -3)


def grouped_products(rows: Tensor, weights: Tensor) -> Any:
    """Products of groups of rows, equally many, with a matrix each."""
    groups = weights.size(0)
    ends = [rows.size(0) * (group + 1) // groups for group in range(groups)]
    return _ATEN._grouped_mm(rows, weights, torch.tensor(ends, dtype=torch.int32))


def block_attention_forward(q: Tensor, k: Tensor, causal: bool, window: int, capped: bool, drops: bool) -> Any:
    """A block's. capped: whether logits have a soft-cap; drops: whether there is dropout."""
    return _OPS.attention_fwd(q, k, k, *_how(causal, window, capped, drops))


def block_attention_backward(q: Tensor, k: Tensor, causal: bool, window: int, capped: bool, drops: bool) -> Any:
    """Its backward."""
    lse = q.new_zeros(q.shape[:-1], dtype=accumulation_type(q.dtype))
    return _OPS.attention_bwd(q, q, k, k, q, lse, *_how(causal, window, capped, drops))


def _how(causal: bool, window: int, capped: bool, drops: bool) -> tuple[Any, ...]:
    state = torch.zeros(2, dtype=torch.int64) if drops else None
    return None, None, None, state, "none", "none", 1.0, causal, window, 30.0 * capped, 0.1 * drops


def _cache_size(name: str, otherwise: int) -> int:
    """A cache's bytes as the system says, where it does."""
    found = os.sysconf(name) if name in os.sysconf_names else 0
    return found if found > 0 else otherwise


def _taken(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _least(function: Callable[[], object]) -> float:
    """The least of a few calls."""
    return min(_taken(function) for _ in range(CALLS))
