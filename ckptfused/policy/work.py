"""How long a step takes on a device: each op by a roofline, of PyTorch's and ckptfused's alike, while it runs on meta.

A product takes the longer of its FLOPs and its bytes, attention its FLOPs, everything else the bytes that it reads and
writes; each op a launch beside. Ops that make views or memory take nothing. Nothing runs beside anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ckptfused.cost import OpenLedger
from ckptfused.cost.work import AttentionWork, LowRank, Product
from ckptfused.fake import gets_own_memory
from ckptfused.policy.devices import Device
from ckptfused.spec import parse

aten = torch.ops.aten
_FREE = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach),
    *(aten._unsafe_view, aten.lift_fresh, aten.set_, aten._local_scalar_dense),
}
_PICK = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}
"""These read a part of their first operand, as large as the result."""
_DRAW = {aten.bernoulli, aten.bernoulli_, aten.native_dropout, aten.normal_, aten.uniform_, aten.rand}
_FUNCTIONS = {
    *(aten.exp, aten.log, aten.tanh, aten.erf, aten.sigmoid, aten.silu, aten.gelu, aten.pow, aten.cos, aten.sin),
    *(aten._softmax, aten._log_softmax, aten.silu_backward, aten.gelu_backward, aten._log_softmax_backward_data),
}
_WIDE = ("norm_", "residual_")
"""Small ops of ckptfused's that read x's rows beside what they write."""


class Work(TorchDispatchMode):
    """While it is active, `spend` is told the seconds of each op."""

    def __init__(self, device: Device, opened: OpenLedger, spend: Callable[[float], None]) -> None:
        super().__init__()
        self._device = device
        self._opened = opened
        self._spend = spend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        own = func.namespace == "ckptfused"
        begin = len(self._opened) if own else 0
        for t in written(func, args, kwargs):
            gets_own_memory(t)
        out = func(*args, **kwargs)
        if own:
            self._spend(self._of_ledger(begin, args))
        elif packet in flop_registry:
            self._spend(self._of_product(packet, args, kwargs, out))
        elif packet not in _FREE and not _is_view(func):
            self._spend(self._of_bytes(func, args, kwargs, out))
        return out

    def attention(self, causal: bool) -> Callable[[float, Tensor, Tensor], None]:
        """What is told of attention, of q and k, that is not an op of its own."""

        def noted(share: float, q: Tensor, k: Tensor) -> None:
            flops = share * 4 * prod(q.shape) * k.size(-2) * (0.5 if causal else 1.0)
            self._spend(flops / self._device.attention_rate(q.dtype) + self._device.launch)

        return noted

    def grouped(self, share: float, rows: Tensor, weights: Tensor) -> None:
        """The same of products of groups of rows [N, C] with matrices [E, C, K]."""
        groups, depth, columns = weights.shape
        each = -(-rows.size(0) // groups)
        self._spend(share * self._device.product_seconds(each, columns, depth, rows.dtype, groups))

    def _of_product(self, packet: Any, args: Any, kwargs: Any, out: Any) -> float:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        result = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
        if result is None or result.numel() == 0:
            return 0.0
        if "attention" in str(packet):
            return flops / self._device.attention_rate(result.dtype) + self._device.launch
        if result.dim() == 2 or packet in (aten.bmm, aten.baddbmm):
            batch = result.size(0) if result.dim() == 3 else 1
            rows, columns = result.shape[-2:]
            depth = flops // (2 * batch * rows * columns)
            return self._device.product_seconds(rows, columns, depth, result.dtype, batch)
        moved = _bytes((args, kwargs, out))
        return max(flops / self._device.product_rate(result.dtype), moved / self._device.copy) + self._device.launch

    def _of_bytes(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        packet = func.overloadpacket
        given = args[1:] if packet in _PICK else args
        moved = _bytes((given, kwargs)) + _bytes(out) * (2 if packet in _PICK else 1)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not results and func._schema.is_mutable:  # of lists of tensors, which it reads and writes
            return 2 * moved / self._device.copy + self._device.launch
        entries = results[0].numel() if results else 0
        rate = self._device.draws if packet in _DRAW else self._device.functions if packet in _FUNCTIONS else math.inf
        return max(moved / self._device.copy, entries / rate) + self._device.launch if results else 0.0

    def _of_ledger(self, begin: int, args: Any) -> float:
        """Of one op of ckptfused's. What its small ops move is not in the ledger: a buffer is written by a product and
        read by a small op, or the other way round, so that small ops move each once; norms and residual sums read x,
        or what is as wide, beside."""
        ledger = self._opened.since(begin)
        device, x = self._device, next((t for t in tree_leaves(args) if isinstance(t, Tensor)), None)
        if x is None:
            return 0.0
        causal = _causal(args)
        seconds = 0.0
        types = {event[4] for event in ledger.events if event[0] == "product"} - {"Undefined"}
        dtype = _TYPES.get(next(iter(types), ""), x.dtype)
        for work in ledger.work:
            if isinstance(work, Product):
                seconds += device.product_seconds(work.n, work.k, work.c, dtype)
            elif isinstance(work, AttentionWork):
                seconds += work.flops * (0.5 if causal else 1.0) / device.attention_rate(dtype)
            elif isinstance(work, LowRank):
                seconds += max(work.flops / device.product_rate(dtype), work.n * work.k * dtype.itemsize / device.copy)
        small = {name: times for name, times in ledger.launches.items() if name != "product"}
        moved = sum(event[3][1] for event in ledger.events if event[0] == "allocation")
        moved += sum(times for name, times in small.items() if name.startswith(_WIDE)) * x.nbytes
        return seconds + moved / device.copy + sum(small.values()) * device.launch


_TYPES = {"Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16, "Half": torch.float16}


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What an op writes of its arguments."""
    for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _causal(args: Iterable[Any]) -> bool:
    """Whether a block's attention is, of the arguments of its op."""
    for text in args:
        if isinstance(text, str) and "attn" in text:
            spec = parse(text)
            return spec.attn is not None and spec.attn.causal
    return False


def _is_view(func: Any) -> bool:
    """Whether an op's result is its argument's memory, unchanged."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _bytes(values: Any) -> int:
    """That are read or written of tensors; of expanded ones, those that there are."""
    found = (t for t in tree_leaves(values) if isinstance(t, Tensor))
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in found)
