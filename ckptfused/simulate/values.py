"""Values of tensors that are on the meta device, where they are known: those of the batch, and what follows of them.

Models look at masks and positions to choose what to do: whether a mask hides anything, where packed sequences begin,
which rows have a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_dispatch import (
    DispatchMode,
    dispatch_modes,
    tensors_of,
    without_dispatch_modes,
    written_arguments,
)
from ckptfused.compat.torch_memory import allocations, storage_id
from ckptfused.ops.fake import hold_surplus, surplus_of
from ckptfused.state.fingerprints import batch_leaves

MOST_ENTRIES = 1 << 18
"""Entries of a tensor whose values are kept, or as many as the largest mask or positions of the batch have: what holds
no fractions, or is square."""
LARGEST = 1 << 24
"""Entries of a tensor of the batch above which it is as one without values: ops on them would take longer than all
else."""
aten = torch.ops.aten
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
"""These take booleans, whose number of results depends on values, beside tensors that need not be known."""
_MAKE = {aten.arange, aten.full, aten.ones, aten.zeros, aten.scalar_tensor}
LENGTHS = {
    aten._ctc_loss.Tensor: (2, 3),
    aten._ctc_loss_backward.Tensor: (3, 4),
    aten._pack_padded_sequence.default: (1,),
}
"""By where their lengths are, which decide how much there is."""
_UNSET = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.set_}
_CPU = torch.device("cpu")


class KnownValues(DispatchMode):
    """While it is active, ops on known tensors are computed, too, on the CPU; what asks for a value gets it.

    pairs: a tensor on the meta device, and one with its values. on_cpu: the meta device stands for the CPU at hand.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], on_cpu: bool = False) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self.asked = False
        """Whether a number was asked for that is not known: an error, which somebody may catch."""
        self._values = WeakTensorKeyDictionary()
        self._given = WeakTensorKeyDictionary()
        """The batch's tensors and numbers that follow of them, which may be of `torch.empty`: shapes alone count. Where
        they are compared the results are booleans, of which any may be."""
        self._spoiled: list[torch.UntypedStorage] = []
        pairs = list(pairs)
        masks = (t for _, t in pairs if not t.is_floating_point() or (t.dim() > 1 and t.size(-1) == t.size(-2)))
        self._most = max([MOST_ENTRIES, *(t.numel() for t in masks if t.numel() <= LARGEST)])
        for meta_copy, value in pairs:
            self._given[meta_copy] = True
            if meta_copy.is_meta and self._is_small(value):
                self._values[meta_copy] = value.detach().to("cpu", copy=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.layout == torch.jagged for t in tensors_of(args, kwargs)):
            return NotImplemented  # their own class first: it makes other ops of it
        if func.overloadpacket is aten.embedding:
            self._check_rows(args[0], args[1])
        if func.overloadpacket in _INDEXED:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        if func in LENGTHS:
            args = tuple(self._lengths(value) if place in LENGTHS[func] else value for place, value in enumerate(args))
        if func.overloadpacket is aten._to_copy and kwargs.get("device") == _CPU:
            value = self._value(args[0])
            if value is not None and args[0].is_meta:  # whoever asks for it there looks at it
                if kwargs.get("dtype") not in (None, value.dtype):
                    return func(value, **kwargs)
                if not surplus_of(value):
                    hold_surplus(value, [aten.alias(args[0])])  # it is the same memory
                return aten.alias(value)
        found = self._computed(func, args, kwargs)
        self.asked |= found is None and func.overloadpacket is aten._local_scalar_dense and args[0].is_meta
        if found is not None and any(t.is_cpu for t in written_arguments(func, args, kwargs)):
            return found
        if found is None:
            self._forget(func, args, kwargs)
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags or not tensors_of(found):
            return found
        if torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(lambda t: torch.empty_like(t, device="meta"), found)
            if self._on_cpu:  # what it held within itself, for a moment
                torch.empty(self._within(func, args, kwargs), dtype=torch.uint8, device="meta")
        else:
            out = func(*args, **kwargs)
        for meta_copy, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
            if isinstance(meta_copy, Tensor) and meta_copy.is_meta and self._is_small(value):
                self._values[meta_copy] = value
                if meta_copy.dtype != torch.bool and any(t in self._given for t in tensors_of(args, kwargs)):
                    self._given[meta_copy] = True
        return out

    def _value(self, t: Tensor) -> Tensor | None:
        found = t if t.device.type == "cpu" else self._values.get(t)
        if found is None or any(storage_id(found) == storage_id(storage) for storage in self._spoiled):
            return None
        return found

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op all of whose operands are known, on the CPU; else None."""
        if func.namespace != "aten" or func.overloadpacket in _UNSET or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        given = tensors_of(args, kwargs)
        makes = not given and func.overloadpacket in _MAKE and _entries(func, args) <= self._most
        makes = makes or (func.overloadpacket is aten._to_copy and kwargs.get("device") == torch.device("meta"))
        if not makes and not any(t.is_meta for t in given):
            return None
        values = [self._value(t) for t in given]
        if not all(map(self._is_small, values)):
            return None
        shapes = [t.shape for t in values if t is not None]
        if torch.Tag.pointwise in func.tags and prod(torch.broadcast_shapes(*shapes)) > self._most:
            return None  # a causal mask, of two rows of positions
        with without_dispatch_modes():
            try:
                return self._call(func, args, kwargs)()
            except (RuntimeError, NotImplementedError):  # such as of a kernel that the CPU does not have
                return None

    def _call(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        """An op of known tensors, on the CPU."""
        args, kwargs = tree_map(lambda x: self._value(x) if isinstance(x, Tensor) else x, (args, kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": _CPU}
        return partial(func, *args, **kwargs)

    def _within(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that it allocates and frees within itself."""
        with without_dispatch_modes():
            _, changes = allocations(self._call(func, args, kwargs))
        return max(accumulate(changes, initial=0)) - sum(changes)

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """An index by booleans as indices by numbers."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if (value := self._value(index)) is None:
            return [*index.nonzero().unbind(-1)]
        found: list[Tensor | None] = []
        for place in value.nonzero(as_tuple=True):
            meta_copy = torch.empty_like(place, device="meta")
            self._values[meta_copy] = place
            found.append(meta_copy)
        return found

    def _check_rows(self, weight: Tensor, index: Tensor) -> None:
        """Raises, as with data, where an embedding has no row of a number that is known: of a position, say."""
        value = None if index in self._given else self._value(index)
        if value is not None and value.numel() and int(value.max()) >= len(weight):
            raise IndexError(
                f"index out of range: an embedding of size {len(weight):,} has no row {int(value.max()):,}"
            )

    def _lengths(self, lengths: Tensor) -> Tensor:
        """Lengths that are known, on the CPU."""
        value = self._value(lengths)
        return lengths if value is None else value

    def _is_small(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() <= self._most and value.layout == torch.strided

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """What an op writes of others."""
        self._spoiled += [
            self._values[t].untyped_storage() for t in written_arguments(func, args, kwargs) if t in self._values
        ]


@contextmanager
def may_ask() -> Iterator[None]:
    """A context in which code asks for numbers, and knows what to do where they are not known."""
    known = [(mode, mode.asked) for mode in dispatch_modes() if isinstance(mode, KnownValues)]
    try:
        yield
    finally:
        for mode, asked in known:
            mode.asked = asked


def tensors_with_values(batch: Any, twins: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a batch that have values, behind their twins."""
    pairs = zip(batch_leaves(twins), batch_leaves(batch), strict=True)
    return [(meta_copy, t) for meta_copy, t in pairs if isinstance(t, Tensor) and not t.is_meta]


def _entries(func: Any, args: Any) -> float:
    """Number of entries of the tensor that one of `_MAKE` makes."""
    if func.overloadpacket is aten.scalar_tensor:
        return 1
    if func.overloadpacket is not aten.arange:
        return prod(args[0])
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return float((end - start) / step)
