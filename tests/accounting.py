"""What a call saves, allocates and multiplies, as PyTorch itself counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused.modules import rotary

# Outputs given or not; "product" is the record of ours in oneDNN, and tiled attention's own leave none.
PRODUCTS = ("aten::mm", "aten::addmm", "ckptfused::product")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_LAUNCHING = (*PRODUCTS, "aten::sum", ATTENTION, f"{ATTENTION}_backward")


def saved_bytes(
    function: Callable[[], Tensor], module: torch.nn.Module | None = None, own: Iterable[Tensor] = ()
) -> int:
    """Bytes of the unique storages that autograd saves in a call, less the module's, the caller's `own` and the rotary
    tables, of which all blocks of a process share one.
    """
    owned = [*own, *(() if module is None else (*module.parameters(), *module.buffers()))]
    ignored = {t.untyped_storage().data_ptr() for t in owned}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in ignored:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function()
    tables = {t.untyped_storage().data_ptr() for table in rotary._tables.values() for t in table.pair}
    total = sum(storage.nbytes() for place, storage in storages.items() if place not in tables)
    del y
    return total


@dataclass
class _Buffer:
    nbytes: int
    op: tuple[int, str] | None  # number and name of the outermost op of PyTorch's or product that allocated it
    internal: bool = False  # freed by that op, too

    @property
    def of_product(self) -> bool:
        return self.op is not None and self.op[1] in PRODUCTS


class _Op(NamedTuple):
    name: str
    inputs: Any
    within: bool  # a product, a sum or attention of PyTorch's


def _ops(events: Iterable[Any], within: bool) -> Iterator[_Op]:
    """The ops among these events and below them."""
    for event in events:
        if event.name.startswith(("aten::", "ckptfused::")):
            yield _Op(event.name, event.extra_fields.inputs, within)
        yield from _ops(event.children, within or event.name in _LAUNCHING)


class Events:
    """The PyTorch ops and the allocations of a call, in the order of time."""

    def __init__(self, function: Callable[[], Any]) -> None:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
            self.result = function()
        # Not prof.events(): what that makes of an event takes a hundred times as long as the event.
        tree = prof.profiler.kineto_results.experimental_event_tree()
        self._ops = list(_ops(tree, within=False))
        self._changes = self._read_memory(tree)

    @staticmethod
    def _read_memory(tree: Iterable[Any]) -> list[tuple[_Buffer, int]]:
        """Every allocation (+1) and every free (-1) of something allocated in the call."""
        live: dict[int, _Buffer] = {}
        changes = []
        for op, memory in sorted(_allocations(tree, None), key=lambda found: found[1][0]):
            _, pointer, nbytes = memory
            if nbytes > 0:
                live[pointer] = _Buffer(nbytes, op)
                changes.append((live[pointer], 1))
            elif nbytes < 0 and pointer in live:
                buffer = live.pop(pointer)
                buffer.internal = op is not None and op == buffer.op
                changes.append((buffer, -1))
        for op in {buffer.op for buffer, _ in changes if buffer.internal}:
            if op is not None and op[1].startswith(ATTENTION):
                _take_out([(buffer, sign) for buffer, sign in changes if buffer.op == op])
        return changes

    def live_bytes(self) -> int:
        """Bytes allocated in the call and not freed by its end."""
        return sum(sign * buffer.nbytes for buffer, sign in self._changes)

    def peak_bytes(self, internal: bool = False) -> int:
        """The most bytes that were allocated at a time, above what was there before.

        internal: with what a PyTorch op other than a product allocated and freed within itself. A product's workspace
        is its library's: oneDNN has it from PyTorch's allocator, MKL from its own.
        """
        total = peak = 0
        for buffer, sign in self._changes:
            if not buffer.internal or (internal and not buffer.of_product):
                total += sign * buffer.nbytes
                peak = max(peak, total)
        return peak

    def products(self) -> Counter[tuple[int, int, int]]:
        """How many two-dimensional matrix products [n, c] x [c, k] of each n, k, c there were."""
        found: Counter[tuple[int, int, int]] = Counter()
        for op in self._ops:
            if op.name in PRODUCTS:
                first = 1 if op.name == "aten::addmm" else 0
                (n, c), (_, k) = (argument.sizes for argument in op.inputs[first : first + 2])
                found[n, k, c] += 1
        return found

    def product_flops(self) -> int:
        """FLOPs of all two-dimensional matrix products."""
        return sum(2 * n * k * c * times for (n, k, c), times in self.products().items())

    def launches(self, name: str) -> int:
        """How many calls of this op there were but within a product, a sum or attention of PyTorch's."""
        return sum(op.name == name and not op.within for op in self._ops)

    def count(self, *names: str) -> int:
        """How many ops have one of these names."""
        return sum(op.name in names for op in self._ops)


def _take_out(changes: list[tuple[_Buffer, int]]) -> None:
    """What attention itself allocates is not internal to it: all before it works, freed when it has. In bfloat16 its
    products have workspaces in between."""
    signs = [sign for _, sign in changes]
    first, last = signs.index(-1), len(signs) - 1 - signs[::-1].index(1)
    begins = {id(buffer) for buffer, _ in changes[:first]}
    for buffer, _ in changes[last + 1 :]:
        buffer.internal = buffer.internal and id(buffer) not in begins


def _allocations(
    events: Iterable[Any], op: tuple[int, str] | None
) -> Iterator[tuple[tuple[int, str] | None, tuple[int, int, int]]]:
    """Allocations below these events as (time, address, bytes), each with its outermost op of PyTorch's or product."""
    for event in events:
        fields = event.extra_fields
        if type(fields).__name__ == "_ExtraFields_Allocation":
            yield op, (event.start_time_ns, fields.ptr, fields.alloc_size)
        elif op is None and (event.name.startswith("aten::") or event.name in PRODUCTS):
            yield from _allocations(event.children, (event.id, event.name))
        else:
            yield from _allocations(event.children, op)


class CountOps(TorchDispatchMode):
    """How often each op was called: in an eager run, those that a fused op calls itself are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def blocks(self) -> tuple[int, int]:
        """Fused forwards and backwards."""
        return self.calls["ckptfused.block_fwd"], self.calls["ckptfused.block_bwd"]
