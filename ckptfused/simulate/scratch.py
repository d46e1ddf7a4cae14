"""What ops of PyTorch's allocate and free within themselves on the CPU at hand: each runs alone, once for all of its
kind.

oneDNN reorders a convolution's operands, or lays its patches out, as shapes, types and the processor have it: 0 to 150
times the operands in random convolutions, so that no closed form and no factor bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import TensorWeakRef

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_autograd import graph_task
from ckptfused.compat.torch_dispatch import tensors_of, written_arguments
from ckptfused.compat.torch_memory import allocations, is_view, storage_id
from ckptfused.ops.fake import gets_own_memory, hold_surplus, surplus_of
from ckptfused.simulate.alone import OpCall

LARGEST, MOST_FLOPS = 1 << 30, 1e11
"""Bytes of operands and results, and FLOPs, above which an op is not run as it is."""
aten = torch.ops.aten
_BATCHED = {aten.convolution: (0,), aten.convolution_backward: (0, 1)}
"""By where their operands with a batch are. Of too large a batch a part runs, as often as the batch has it counts."""

_KEEP_NUMBERS = {
    *(aten.mul.Tensor, aten.mul_.Tensor),
    *(aten.div.Tensor, aten.div_.Tensor, aten.div.Tensor_mode, aten.div_.Tensor_mode),
}

_LOOK_AT_VALUES = {aten.prod, aten.linalg_householder_product, aten._linalg_slogdet}
"""Their backward takes another way by what it finds: a zero, say."""


class OpMemory(NamedTuple):
    """Bytes that a call holds beside the elements of its results."""

    within: int
    """At most, until it ends."""
    after: int
    """For as long as the results live, beside their storages: patches that it made, say."""
    strides: tuple[tuple[int, ...], ...] = ()
    """The results' strides: PyTorch may lay them out in another way where there is no data."""
    sizes: tuple[int, ...] = ()
    """Bytes of the results' storages: PyTorch may make them smaller there (`nn.EmbeddingBag`'s)."""

    def laid_out(self, args: Any, kwargs: Any, out: Any) -> Any:
        """The results of meta tensors as those of the call are laid out, where they have memory of their own, and no
        smaller."""
        made = tensors_of(out)
        theirs = {storage_id(t) for t in tensors_of(args, kwargs)}
        for t, size in zip(made, self.sizes, strict=False) if len(made) == len(self.sizes) else ():
            more = size - t.untyped_storage().nbytes()
            if t.is_meta and more > 0 and storage_id(t) not in theirs:
                hold_surplus(t, [torch.empty(more, dtype=torch.uint8, device="meta")])
        known = len(made) == len(self.strides) and not any(storage_id(t) in theirs for t in made)
        if not known or all(t.stride() == strides for t, strides in zip(made, self.strides, strict=True)):
            return out
        again = dict(zip(map(id, made), self.strides, strict=True))
        return tree_map(lambda t: _restrided(t, again[id(t)]) if id(t) in again else t, out)


def _restrided(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=False))
    if not t.is_meta or len(strides) != t.dim() or spanned != t.numel():
        return t
    return t.new_empty(0).set_(t.untyped_storage(), 0, t.shape, strides)  # type: ignore[call-overload]


class Scratch:
    """What calls hold, by kind of op."""

    def __init__(self) -> None:
        self._known: dict[Hashable, OpMemory | None] = {}
        self._copied: dict[Hashable, list[bool] | None] = {}

    def of(self, op: Any, args: Any, kwargs: Any, out: Any, copies: Sequence[Tensor] = ()) -> OpMemory | None:
        """What one call holds; None: it cannot be run alone, or is too large. out: the results. copies: what `copied`
        gave, which has its memory already; a kernel may ask for that when it holds nothing else any more.
        """
        tensors = tensors_of(args, kwargs, out)
        if any(t.layout != torch.strided for t in tensors):
            return None
        whole = _unique(args, kwargs)
        sizes = sum(t.nbytes for t in tensors)
        packet = op.overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        parts, over = 1, max(sizes / LARGEST, flops / MOST_FLOPS)
        if over > 1:
            if packet not in _BATCHED:
                return None
            batch = max(1, args[0].size(0))
            each = max(1, int(batch / over))
            parts = -(-batch // each)
            places = _BATCHED[packet]
            args = [value[:each] if place in places else value for place, value in enumerate(args)]
        call = OpCall(op, args, kwargs)
        own = tuple(any(t is copy for copy in copies) for t in whole)
        if (kind := (call.kind, own)) not in self._known:
            self._known[kind] = scratch_of(call, own)
        found = self._known[kind]
        return found if found is None or parts == 1 else OpMemory(parts * found.within, parts * found.after)

    def copied(self, op: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors of which an op has copies on write get memory of their own, though it may only read them; of an
        op that is too large to run alone, none are known."""
        largest = LARGEST // 16 if op.overloadpacket in flop_registry else LARGEST
        if sum(t.nbytes for t in tensors_of(args, kwargs)) > largest:
            return []
        call = OpCall(op, args, kwargs)
        if call.kind not in self._copied:
            self._copied[call.kind] = call.copies_made()
        return [t for t, made in zip(_unique(args, kwargs), self._copied[call.kind] or (), strict=False) if made]


def _unique(args: Any, kwargs: Any) -> list[Tensor]:
    return [*{id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values()]


class Surplus:
    """Bytes that results of meta tensors hold beyond their elements, for as long as their storages live."""

    def __init__(self) -> None:
        self._any = False

    def keep(self, out: Any, size: int) -> None:
        """In the first of the results."""
        made = next((t for t in tensors_of(out) if t.is_meta), None)
        if made is not None:
            hold_surplus(made, [made.new_empty(size, dtype=torch.uint8)])
            self._any = True

    def hand_on(self, first: Any, out: Tensor) -> None:
        """To a sum of gradients, for which autograd takes the memory of the first, where nobody else holds that."""
        if self._any and graph_task() != -1 and isinstance(first, Tensor) and first.layout == torch.strided:
            hold_surplus(out, surplus_of(first))


class Grown:
    """Tensors that an op writes, which get memory of their own where they copy on write, and memory where it resizes
    them: of that no allocator is asked where there is no data."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self._given = args, kwargs
        self._before: list[tuple[Tensor, int]] = []
        for t in written_arguments(op, args, kwargs):
            gets_own_memory(t)
            if t.is_meta and t.layout == torch.strided and op.overloadpacket is not aten.set_:
                self._before.append((t, t.untyped_storage().nbytes()))

    def count(self, out: Any, number_of: Callable[[Tensor], int | None]) -> None:
        """After the op. number_of: None of a tensor whose memory was not asked for."""
        for t, before in self._before:
            if (size := t.untyped_storage().nbytes()) > before:
                _resized(t, before, size)
        for t in tensors_of(out):
            if t.is_meta and t.layout == torch.strided and number_of(t) is None and not surplus_of(t):
                size = t.untyped_storage().nbytes()
                given = (one for one in tensors_of(self._given) if one.layout == torch.strided)
                if size and storage_id(t) not in map(storage_id, given):
                    _resized(t, 0, size)


def _resized(t: Tensor, before: int, size: int) -> None:
    whole = torch.empty(size if before else 0, dtype=torch.uint8, device="meta")  # beside what it was, for a moment
    hold_surplus(t, [torch.empty(size - before, dtype=torch.uint8, device="meta")])
    del whole


class InBackward:
    """Memory of an op's backward that is not asked for where there is no data. Numbers by which tensors are multiplied
    or divided: on a CPU each is a tensor, which the graph keeps until its backward has run. And what a backward holds
    that looks at values, while it runs: at most.
    """

    def __init__(self) -> None:
        self._last: tuple[TensorWeakRef, int, bool] | None = None

    def note(self, op: Any, args: Any, out: Any) -> None:
        """After an op of which autograd has yet to make the node."""
        if op in _KEEP_NUMBERS and not isinstance(args[1], Tensor):
            size = {bool: 1, complex: 16}.get(type(args[1]), 8)
            self._last = TensorWeakRef(out._base if is_view(out) else out), size, False
        elif op.overloadpacket in _LOOK_AT_VALUES:
            # A flag and a count of zeros, or a copy and flags.
            size = args[0].numel() * (9 if op.overloadpacket is aten.prod else args[0].itemsize + 1)
            self._last = TensorWeakRef(next(iter(tensors_of(out)))), size, True

    def keep(self) -> None:
        """Before the next op, or phase."""
        (found, size, for_a_while), self._last = self._last or (lambda: None, 0, False), None
        out = found()
        if out is None or out.grad_fn is None:
            return
        device, kept = out.device, [] if for_a_while else [out.new_empty(size, dtype=torch.uint8)]
        if for_a_while:
            out.grad_fn.register_prehook(lambda grads: kept.append(torch.empty(size, dtype=torch.uint8, device=device)))
        out.grad_fn.register_hook(lambda *grads: kept.clear())


def scratch_of(call: OpCall, copies: Sequence[bool] = ()) -> OpMemory | None:
    """What a call holds; None: it cannot be run alone. copies: which of its tensors get memory of their own in it, that
    does not count."""
    found: list[OpMemory] = []

    def observed(function: Callable[[], Any], of_copies: int = 0) -> None:
        results, changes = allocations(function)
        tensors = [t for t in tensors_of(results) if t.layout == torch.strided]
        storages = {storage_id(t): t.untyped_storage().nbytes() for t in tensors}
        left, most = sum(changes), max(accumulate(changes, initial=0))
        strides, sizes = tuple(t.stride() for t in tensors), tuple(storages[storage_id(t)] for t in tensors)
        found.append(OpMemory(most - left, max(0, left - of_copies - sum(storages.values())), strides, sizes))

    done = call.run_with_copies(copies, observed) if any(copies) else call.run(observed)
    return found[0] if done else None
