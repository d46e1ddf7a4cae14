"""Values of tensors that are on the meta device, where they are known: those of the batch, and what follows of them.

Models look at masks and positions to choose what to do: whether a mask hides anything, where packed sequences begin,
which rows have a label.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_dispatch import (
    DispatchMode,
    schema_of,
    tensors_of,
    without_dispatch_modes,
    written_arguments,
)
from ckptfused.compat.torch_memory import storage_id
from ckptfused.ops.fake import hold_surplus

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
_PACK = aten._pack_padded_sequence.default
_LENGTHS = {
    aten._ctc_loss.Tensor: (2, 3),
    aten._ctc_loss_backward.Tensor: (3, 4),
    _PACK: (1,),
}
"""By where their lengths are, which decide how much there is."""
_UNSET = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.set_}
_CPU, _META = torch.device("cpu"), torch.device("meta")


class KnownValues(DispatchMode):
    """While it is active, ops on known tensors are computed, too, on the CPU; what asks for a value gets it.

    pairs: a tensor on the meta device, and one with its values. on_cpu: the meta device stands for the CPU, so that
    tensors which a model makes on the CPU by name (`torch.zeros(n, n)`) are on the meta device, too.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], on_cpu: bool = False) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self._values = WeakTensorKeyDictionary()
        self._given = WeakTensorKeyDictionary()
        """The batch's tensors and what follows of them, which may be of `torch.empty`: shapes alone count."""
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
        if self._on_cpu and _names_cpu(func, args, kwargs):
            return self._on_meta(func, args, kwargs)
        if func.overloadpacket is aten.embedding:
            self._check_rows(args[0], args[1])
        if func.overloadpacket in _INDEXED:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        if func in _LENGTHS:
            args = tuple(self._lengths(value) if place in _LENGTHS[func] else value for place, value in enumerate(args))
        found = self._computed(func, args, kwargs)
        if found is None:
            self._forget(func, args, kwargs)
            out = func(*args, **kwargs)
            return tree_map(_counted, out) if func is _PACK else out
        if torch.Tag.data_dependent_output in func.tags or not tensors_of(found):
            return found
        if torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(lambda t: torch.empty_like(t, device="meta"), found)
        else:
            out = func(*args, **kwargs)
        for meta_copy, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
            if isinstance(meta_copy, Tensor) and meta_copy.is_meta and self._is_small(value):
                self._values[meta_copy] = value
                if any(t in self._given for t in tensors_of(args, kwargs)):
                    self._given[meta_copy] = True
        return out

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The result, on the meta device, of an op that makes a tensor on the CPU by name. What is copied there is
        there; with its values, where they are known: the model looks at them."""
        packet, given = func.overloadpacket, tensors_of(args, kwargs)
        if packet is aten._to_copy:
            value = self._value(args[0])
            if value is not None:
                with without_dispatch_modes():
                    return func(value, **kwargs)  # type: ignore[no-any-return]
            if kwargs.get("dtype") in (None, args[0].dtype):
                return aten.alias(args[0])  # type: ignore[no-any-return]
        if packet is aten.empty and not (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point:
            return _counted(func(*args, **kwargs))  # lengths of packed sequences, say, which PyTorch writes itself
        value = None
        if packet is aten.lift_fresh:
            (value,) = args
            out = torch.empty_like(value, device=_META)
        else:
            theirs = {name: None for name in ("generator", "pin_memory") if name in kwargs}
            out = func(*args, **{**kwargs, **theirs, "device": _META})
            if not given and out.numel() <= self._most:
                with without_dispatch_modes():
                    value = func(*args, **kwargs)
        if self._is_small(value):
            self._values[out] = value
        return out

    def _value(self, t: Tensor) -> Tensor | None:
        found = t if t.device.type == "cpu" else self._values.get(t)
        if found is None or any(storage_id(found) == storage_id(storage) for storage in self._spoiled):
            return None
        return found

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op all of whose operands are known, on the CPU; else None."""
        draws = torch.Tag.nondeterministic_seeded in func.tags and not self._on_cpu
        if func.namespace != "aten" or func.overloadpacket in _UNSET or draws:
            return None
        given = tensors_of(args, kwargs)
        makes = not given and func.overloadpacket in _MAKE and _entries(func, args) <= self._most
        makes = makes or (func.overloadpacket is aten._to_copy and kwargs.get("device") == _META)
        if not makes and not any(t.is_meta for t in given):
            return None
        values = [self._value(t) for t in given]
        if not all(map(self._is_small, values)):
            return None
        shapes = [t.shape for t in values if t is not None]
        if torch.Tag.pointwise in func.tags and prod(torch.broadcast_shapes(*shapes)) > self._most:
            return None  # a causal mask, of two rows of positions
        rest = iter(values)
        args, kwargs = tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (args, kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": _CPU}
        with without_dispatch_modes():
            try:
                return func(*args, **kwargs)
            except (RuntimeError, NotImplementedError):  # such as of a kernel that the CPU does not have
                return None

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """An index by booleans as indices by numbers."""
        if index is None or index.dtype not in (torch.bool, torch.uint8) or (value := self._value(index)) is None:
            return [index]
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


def _counted(t: Tensor) -> Tensor:
    """A tensor; one that is on the CPU counts as long as it is there."""
    if t.is_cpu:
        hold_surplus(t, [torch.empty(t.nbytes, dtype=torch.uint8, device=_META)])
    return t


def _names_cpu(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op makes a tensor on the CPU by name, or of a list (`torch.tensor`)."""
    if func.overloadpacket is aten.lift_fresh:
        return not args[0].is_meta
    if "device" not in kwargs and not any(argument.name == "device" for argument in schema_of(func).arguments):
        return False
    device = kwargs.get("device")
    given = tensors_of(args, kwargs)
    return all(t.is_meta for t in given) and (device == _CPU or (device is None and not given))


def tensors_with_values(batch: Any, twins: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a batch that have values, behind their twins."""
    pairs = zip(tree_leaves(twins), tree_leaves(batch), strict=True)
    return [(meta_copy, t) for meta_copy, t in pairs if isinstance(t, Tensor) and not t.is_meta]


def _entries(func: Any, args: Any) -> float:
    """Number of entries of the tensor that one of `_MAKE` makes."""
    if func.overloadpacket is aten.scalar_tensor:
        return 1
    if func.overloadpacket is not aten.arange:
        return prod(args[0])
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return float((end - start) / step)
