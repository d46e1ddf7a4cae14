"""The arguments of a call, taken apart into tensors and the rest, and put together again in new containers."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ckptfused._extension import _C
from ckptfused.compat import pytree
from ckptfused.recompute.argument_trees import (
    SURELY_LEAVES,
    ArgumentTree,
    FlatArguments,
    TensorSlot,
    are_leaves,
    is_dataclass_instance,
    record_fields,
    taken_apart,
)


@functools.lru_cache(maxsize=256)
def _slots(count: int) -> tuple[TensorSlot, ...]:
    """The first ones, which calls share."""
    return tuple(map(TensorSlot, range(count)))


@dataclasses.dataclass
class Given:
    """The caller's own arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    originals: Callable[[Any], Any]
    """The caller's own where the function has an unwritten copy."""


class _Changes:
    """What a function changes in the containers that it gets, and the caller in those that he gave."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.pairs: list[tuple[Any, Any, dict[Any, Any], dict[str, Any]]] = []

    def begin(self, args: Any, kwargs: Any) -> None:
        theirs = (self.given.args, tuple(self.given.kwargs.values()))
        pairs = _pairs(theirs, (tuple(args), tuple(kwargs.values())))
        self.pairs = [(a, b, _items(b), _attributes(b)) for a, b in pairs]

    def end(self) -> None:
        same = {id(ours): theirs for theirs, ours, *_ in self.pairs}

        def caller(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.given.originals(value)
            return same.get(id(value), value)

        for theirs, ours, items, attributes in self.pairs:
            now = _items(ours)
            if now.keys() != items.keys() or any(now[key] is not items[key] for key in now):
                _put(theirs, {key: caller(value) for key, value in now.items()})
            for name, value in _attributes(ours).items():
                if name not in attributes or attributes[name] is not value:
                    object.__setattr__(theirs, name, caller(value))


# Subclasses, such as Hugging Face's outputs, may refuse by their methods what these do.
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque)


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, (list, deque)) else {}


def _put(container: Any, items: dict[Any, Any]) -> None:
    base = next(base for base in _BASES if isinstance(container, base))
    base.clear(container)
    if issubclass(base, dict):
        for key, value in items.items():
            base.__setitem__(container, key, value)
    else:
        base.extend(container, items.values())


def _attributes(container: Any) -> dict[str, Any]:
    held = dict(getattr(container, "__dict__", ()))
    return {**held, **record_fields(container)} if is_dataclass_instance(container) else held


def _pairs(theirs: Any, ours: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts, dataclasses and registered containers, each with the one that `HeldArgs` built in its place."""
    if theirs is ours or id(ours) in above:
        return
    inside: list[tuple[Any, Any]] = []
    if isinstance(ours, tuple):
        inside += zip(theirs, ours, strict=True)
    elif type(ours) in pytree.SUPPORTED_NODES or is_dataclass_instance(ours):
        yield theirs, ours
        for held in (_items, _attributes):
            before, now = held(theirs), held(ours)
            inside += [(before[key], value) for key, value in now.items() if key in before]
    for a, b in inside:
        if type(b) not in SURELY_LEAVES:
            yield from _pairs(a, b, (*above, id(ours)))


class HeldArgs:
    """The arguments of one call as they were given: what containers held then, tensors by their index."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.structure: FlatArguments | ArgumentTree = FlatArguments(len(args), tuple(kwargs))
        self._distinct = not torch.compiler.is_compiling() and _C.distinct(self.leaves)
        """Whether the leaves are distinct tensors, and nothing else."""
        if not self._distinct and not are_leaves(self.leaves):
            self.leaves, self.structure = taken_apart({"args": args, "kwargs": kwargs})

    def take_tensors(self) -> list[Tensor]:
        """The distinct tensors; places remain."""
        if not torch.compiler.is_compiling():  # Dynamo knows no identities as numbers
            return self._take_tensors()
        tensors: list[Tensor] = []
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                at = next((j for j, t in enumerate(tensors) if t is leaf), len(tensors))
                if at == len(tensors):
                    tensors.append(leaf)
                self.leaves[i] = TensorSlot(at)
        return tensors

    def _take_tensors(self) -> list[Tensor]:
        if self._distinct:
            tensors, self.leaves = self.leaves, [*_slots(len(self.leaves))]
            return tensors
        found = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        distinct = dict(zip(map(id, found), found, strict=True))
        tensors = [*distinct.values()]
        at = dict(zip(distinct, _slots(len(tensors)), strict=True))
        if found:
            self.leaves = [at[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tensors

    def others(self) -> list[Any]:
        """The leaves that are no tensors, once these are taken."""
        return [] if self._distinct else [leaf for leaf in self.leaves if type(leaf) is not TensorSlot]

    def call(self, function: Callable[..., Any], tensors: list[Tensor], given: Given | None = None) -> Any:
        """The function on new containers with these tensors; the list is emptied, so that they die when they can.

        What it puts into lists, dicts and dataclasses or takes out of them, the caller's get too, if `given`.
        """
        if self._distinct:
            leaves = tensors.copy()
        else:
            leaves = [tensors[leaf.index] if type(leaf) is TensorSlot else leaf for leaf in self.leaves]
        tensors.clear()
        if isinstance(self.structure, FlatArguments):
            count, names = self.structure.positional, self.structure.names
            return function(*leaves[:count], **dict(zip(names, leaves[count:], strict=True)))
        changes = None if given is None else _Changes(given)
        tree = self.structure.build(iter(leaves))
        del leaves
        if changes is not None:
            changes.begin(tree["args"], tree["kwargs"])
        try:
            return function(*tree.pop("args"), **tree.pop("kwargs"))
        finally:  # a function that raises has changed them, too
            if changes is not None:
                changes.end()

    def name(self, index: int) -> str:
        """Where the tensor with this index was first given: `args[1][0]`, `kwargs['mask']`."""
        at = next(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSlot) and leaf.index == index)
        return self.structure.paths()[at].removeprefix("['").replace("']", "", 1)
