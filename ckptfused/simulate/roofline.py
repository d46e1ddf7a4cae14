"""How long a step takes on a device: each op by a roofline, of PyTorch's and ckptfused's alike, while it runs on meta.

A product takes the longer of its FLOPs and its bytes, attention its FLOPs, everything else the bytes that it reads and
writes; each op a launch beside. Ops that make views or memory take nothing. Nothing runs beside anything else.

On the CPU at hand (`simulate.cpu_timings`) an op of PyTorch's takes what it takes alone, and so do the products and the
attention of a block of ckptfused's; beside that what it waits for operands, and for being called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ckptfused.compat.torch_dispatch import DispatchMode, called_by_autograd, schema_of, tensors_of
from ckptfused.compat.torch_memory import storage_id
from ckptfused.cost import OpenLedger
from ckptfused.cost.products import AttentionWork
from ckptfused.cost.seconds import LEDGER_TYPES, ledger_seconds
from ckptfused.ops.fake import gets_own_memory, is_copy_on_write
from ckptfused.simulate.alone import Like
from ckptfused.simulate.cpu_timings import (
    Cache,
    attention_backward,
    attention_forward,
    block_attention_backward,
    block_attention_forward,
    grouped_products,
)
from ckptfused.simulate.devices import Device
from ckptfused.simulate.meta_kernels import SELECTING, kernel_on_meta
from ckptfused.simulate.scratch import LARGEST, Grown, InBackward, Surplus
from ckptfused.sizes import size
from ckptfused.spec import AttentionSpec, parse

aten = torch.ops.aten
_FREE = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach),
    *(aten._unsafe_view, aten.lift_fresh, aten.set_, aten._local_scalar_dense),
}
_PICK = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}
"""These read a part of their first operand, as large as the result."""
_DRAW = {aten.bernoulli, aten.bernoulli_, aten.native_dropout, aten.normal_, aten.uniform_, aten.rand}
_DENSE = {aten.mm, aten.addmm}
"""These copy an operand that is expanded, as the gradient of a sum is, for as long as they run; not what is added."""
_CONTIGUOUS = {aten.native_layer_norm, aten.native_layer_norm_backward, aten.embedding_dense_backward}
"""These copy an operand that is not contiguous."""
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_FUNCTIONS = {
    *(aten.exp, aten.log, aten.tanh, aten.erf, aten.sigmoid, aten.silu, aten.gelu, aten.pow, aten.cos, aten.sin),
    *(aten._softmax, aten._log_softmax, aten.silu_backward, aten.gelu_backward, aten._log_softmax_backward_data),
}


MOST_PIECES = 7_000
"""Tiles of FFNs and chunks of losses in one step, about, above which they are not counted one by one: a thousand take
up to a second."""


class TooLargeError(ValueError):
    """A batch that no step takes."""


class Work(DispatchMode):
    """While it is active, `spend` is told the seconds of each op."""

    def __init__(self, device: Device, opened: OpenLedger) -> None:
        super().__init__()
        self.device, self._opened = device, opened
        self.spend: Callable[[float], None] = lambda seconds: None
        self.machine = device.machine
        self._cache = None if device.machine is None else Cache(device.machine.cache)
        self._pieces = 0.0
        self._surplus = Surplus()
        self.in_backward = InBackward()
        self.convolution_scratch = 0
        """Bytes that a convolution was measured to hold within itself, the most of all."""
        self.unmeasured: set[str] = set()
        """Ops that are too large to run alone, and may hold something."""
        self.selects = False
        """Whether values that are not known decide how much there is, which counts as all."""
        self.half_multiplications = 0
        """Multiplications of PyTorch's largest product in half precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.in_backward.keep()
        self.selects |= func.overloadpacket in SELECTING and args[0].is_meta
        own = func.namespace == "ckptfused"
        begin = len(self._opened) if own else 0
        if own:
            self._check_pieces(args)
        grown = Grown(func, args, kwargs)
        copies: list[Tensor] = []
        if self.machine is not None and any(map(is_copy_on_write, tensors_of(args))) and not (own or _is_view(func)):
            copies = [*filter(is_copy_on_write, self.machine.scratch.copied(func, args, kwargs))]
            for t in copies:
                gets_own_memory(t)
        held: list[Tensor] = []  # what stands for memory that the op holds beside its results until it ends
        out = kernel_on_meta(func, self.device.kind, held)(*args, **kwargs)
        grown.count(out, self._opened.number_of)
        if not own and not held:  # else it was counted by what stands for a kernel
            out = self._hold(func, args, kwargs, out, held, copies)
        self._opened.op_ran(func.overloadpacket is aten.add and called_by_autograd())
        held.clear()
        if self.machine is not None:
            self.in_backward.note(func, args, out)
        if own:
            seconds = self._of_ledger(begin, args)
        else:
            seconds = self._rated(func, args, kwargs, out)
            if func.namespace == "aten":
                seconds = self.device.alone(seconds, func, args, kwargs, _bytes((args, kwargs, out)))
        self.spend(seconds + self._waits((args, kwargs), out))
        if func.overloadpacket is aten.add:
            self._surplus.hand_on(args[0], out)
        return out

    def _check_pieces(self, args: Any) -> None:
        """**Raises** `TooLargeError` where one of ckptfused's ops, and those before it, would run in too many."""
        tensors = tensors_of(args)
        if not tensors or tensors[0].dim() < 2:
            return
        rows = tensors[0].numel() // max(1, tensors[0].size(-1))
        weights = [t for t in tensors[1:] if t.dim() == 2 and t.is_floating_point()]
        tokens = tensors[0].shape[:-1]  # of them cos and sin have rows
        widest = max((max(t.shape) for t in weights if t.size(0) not in tokens), default=0)
        limits = [re.search(r"\bscratch=(\d+)", text) for text in args if isinstance(text, str)]
        limit = next((int(found[1]) for found in limits if found), 0) or 1 << 30
        self._pieces += rows * widest * tensors[0].itemsize / limit
        if self._pieces > MOST_PIECES:
            raise TooLargeError(
                f"batch: expected one whose layers and loss run in at most {MOST_PIECES:,} pieces of {size(limit)}, "
                f"got {rows:,} tokens: predict fewer"
            )

    def _hold(self, func: Any, args: Any, kwargs: Any, out: Any, held: list[Tensor], copies: list[Tensor]) -> Any:
        """The results of an op of PyTorch's, as the CPU at hand lays them out. held: gets what stands for memory that
        it has beside them. copies: operands that got memory of their own."""
        packet = func.overloadpacket
        given = tensors_of(args, kwargs)
        # On the CPU, what was made by name; and anywhere an optimizer's numbers, which are on the CPU.
        of_numbers = self.machine is not None or str(packet).startswith("aten._foreach")
        if not given or not (of_numbers or any(map(_is_meta, given))) or packet in _FREE or _is_view(func):
            return out
        if self.machine is not None and func.namespace == "aten":
            measured = self.machine.scratch.of(func, args, kwargs, out, copies)
            if measured is not None:
                if packet in CONVOLUTIONS:
                    self.convolution_scratch = max(self.convolution_scratch, measured.within)
                if within := measured.within + sum(t.nbytes for t in tensors_of(out) if t.is_cpu):  # counted later
                    held.append(torch.empty(within, dtype=torch.uint8, device="meta"))
                if measured.after:
                    self._surplus.keep(out, measured.after)
                return measured.laid_out(args, kwargs, out)
            is_known = packet in flop_registry or torch.Tag.pointwise in func.tags
            if not is_known and _bytes((args, kwargs, out)) > LARGEST:
                self.unmeasured.add(str(packet))
        operands = args[packet is aten.addmm :] if packet in _DENSE | _CONTIGUOUS else ()
        is_copied = _is_expanded if packet in _DENSE else lambda t: not t.is_contiguous()
        held += [t.new_empty(t.shape) for t in operands if _is_meta(t) and is_copied(t)]
        return out

    def attention(self, causal: bool) -> Callable[[float, Tensor, Tensor], None]:
        """What is told of attention, of q and k, that is not an op of its own."""

        def noted(share: float, q: Tensor, k: Tensor) -> None:
            flops = share * 4 * prod(q.shape) * k.size(-2) * (0.5 if causal else 1.0)
            self.half_multiplications = max(self.half_multiplications, q.dtype.itemsize == 2)  # the least workspace
            rated = flops / self.device.attention_rate(q.dtype) + self.device.launch
            run = attention_forward if share == 1.0 else attention_backward
            self.spend(self.device.alone(rated, run, (Like.of(q), Like.of(k), causal)) + self._waits((q, k), ()))

        return noted

    def grouped(self, share: float, rows: Tensor, weights: Tensor) -> None:
        """The same of products of groups of rows [N, C] with matrices [E, C, K]."""
        groups, depth, columns = weights.shape
        each = -(-rows.size(0) // groups)
        rated = self.device.product_rated(each, columns, depth, rows.dtype, groups)
        alone = self.device.alone(rated, grouped_products, (Like.of(rows), Like.of(weights)))
        self.spend(share * alone + self._waits((rows, weights), ()))

    def _waits(self, given: Any, made: Any) -> float:
        """Seconds that the host waits beside the op itself."""
        if self.machine is None or self._cache is None:
            return 0.0
        read, written = (
            {self._storage(t): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors_of(x) if _is_meta(t)}
            for x in (given, made)
        )
        called = self.machine.calls[0 if torch.is_grad_enabled() else 1]
        return self._cache.missed(read, written) / self.machine.memory + called

    def _storage(self, t: Tensor) -> Any:
        number = self._opened.number_of(t)
        return ("before", storage_id(t)) if number is None else number

    def _rated(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """By the roofline."""
        packet = func.overloadpacket
        if packet in flop_registry:
            return self._of_product(packet, args, kwargs, out)
        return 0.0 if packet in _FREE or _is_view(func) else self._of_bytes(func, args, kwargs, out)

    def _of_product(self, packet: Any, args: Any, kwargs: Any, out: Any) -> float:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        result = next(iter(tensors_of(out)), None)
        if result is None or result.numel() == 0:
            return 0.0
        if "attention" in str(packet):
            return flops / self.device.attention_rate(result.dtype) + self.device.launch
        if result.dim() == 2 or packet in (aten.bmm, aten.baddbmm):
            batch = result.size(0) if result.dim() == 3 else 1
            rows, columns = result.shape[-2:]
            depth = flops // (2 * batch * rows * columns)
            if result.dtype in (torch.bfloat16, torch.float16):
                self.half_multiplications = max(self.half_multiplications, rows * columns * depth)
            return self.device.product_rated(rows, columns, depth, result.dtype, batch)
        moved = _bytes((args, kwargs, out))
        return max(flops / self.device.product_rate(result.dtype), moved / self.device.copy) + self.device.launch

    def _of_bytes(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        packet = func.overloadpacket
        given = args[1:] if packet in _PICK else args
        moved = _bytes((given, kwargs)) + _bytes(out) * (2 if packet in _PICK else 1)
        results = tensors_of(out)
        if not results and schema_of(func).is_mutable:  # of lists of tensors, which it reads and writes
            return 2 * moved / self.device.copy + self.device.launch
        entries = results[0].numel() if results else 0
        rate = self.device.draws if packet in _DRAW else self.device.functions if packet in _FUNCTIONS else math.inf
        return max(moved / self.device.copy, entries / rate) + self.device.launch if results else 0.0

    def _of_ledger(self, begin: int, args: Any) -> float:
        """Seconds of one op of ckptfused's, by the ledger."""
        ledger = self._opened.since(begin)
        x = next(iter(tensors_of(args)), None)
        if x is None:
            return 0.0
        types = {event[4] for event in ledger.events if event[0] == "product"} - {"Undefined"}
        dtype = LEDGER_TYPES.get(next(iter(types), ""), x.dtype)
        spec = _attention_of(args)
        rated = ledger_seconds(ledger, self.device, dtype, spec is not None and spec.causal)
        if spec is None or self.device.machine is None:
            return rated.total
        alone = 0.0
        for work in ledger.work:
            if isinstance(work, AttentionWork):
                flops = work.flops * (0.5 if spec.causal else 1.0)
                alone += self.device.alone(flops / self.device.attention_rate(dtype), *_attention(work, spec, dtype))
        return rated._replace(attention=alone).total


def _attention_of(args: Iterable[Any]) -> AttentionSpec | None:
    """A block's attention, of the arguments of its op."""
    for text in args:
        if isinstance(text, str) and "attn" in text:
            return parse(text).attn
    return None


def _attention(work: AttentionWork, spec: AttentionSpec, dtype: torch.dtype) -> tuple[Any, Any]:
    """A block's attention, and what it is called with."""
    q, k = (_rows(work, heads, dtype) for heads in (spec.heads, spec.kv_heads))
    run = block_attention_forward if work.products == 2 else block_attention_backward
    return run, (q, k, spec.causal, spec.window, spec.softcap > 0, spec.p_attn > 0)


def _rows(work: AttentionWork, heads: int, dtype: torch.dtype) -> Like:
    """[B, heads, T, D], token by token in memory."""
    row = heads * work.head_dim
    strides = (work.length * row, work.head_dim, row, 1)
    return Like((work.batch, heads, work.length, work.head_dim), strides, dtype)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.layout == torch.strided


def _is_expanded(t: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))


def _is_view(func: Any) -> bool:
    """Whether an op's result is its argument's memory, unchanged."""
    returns = schema_of(func).returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _bytes(values: Any) -> int:
    """Bytes that are read or written of tensors; of expanded ones, those that there are."""
    found = (t for t in tensors_of(values) if t.layout == torch.strided)
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in found)
