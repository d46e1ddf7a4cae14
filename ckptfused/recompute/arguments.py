"""The arguments of a call, taken apart into tensors and the rest, and put together again in new containers."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.compat import pytree

CYCLE = "expected arguments that can be copied, with no container that is among its own contents"


class _Slot:
    """Stands for a tensor among the leaves, by the tensor's index."""

    def __init__(self, index: int) -> None:
        self.index = index


@functools.lru_cache(maxsize=256)
def _slots(count: int) -> tuple[_Slot, ...]:
    """The first ones, which calls share."""
    return tuple(map(_Slot, range(count)))


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
    return {**held, **_fields(container)} if _is_record(container) else held


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}


def _pairs(theirs: Any, ours: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts, dataclasses and registered containers, each with the one that `HeldArgs` built in its place."""
    if theirs is ours or id(ours) in above:
        return
    inside: list[tuple[Any, Any]] = []
    if isinstance(ours, tuple):
        inside += zip(theirs, ours, strict=True)
    elif type(ours) in pytree.SUPPORTED_NODES or _is_record(ours):
        yield theirs, ours
        for held in (_items, _attributes):
            before, now = held(theirs), held(ours)
            inside += [(before[key], value) for key, value in now.items() if key in before]
    for a, b in inside:
        yield from _pairs(a, b, (*above, id(ours)))


class HeldArgs:
    """The arguments of one call as they were given: what containers held then, tensors by their index."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.structure: _Flat | _Structure = _Flat(len(args), tuple(kwargs))
        self._distinct = not torch.compiler.is_compiling() and _C.distinct(self.leaves)
        """Whether the leaves are distinct tensors, and nothing else."""
        if not self._distinct and not set(map(type, self.leaves)) <= _SURELY_LEAVES:
            self.leaves, self.structure = _flatten({"args": args, "kwargs": kwargs}, (), [])

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
                self.leaves[i] = _Slot(at)
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
        return [] if self._distinct else [leaf for leaf in self.leaves if type(leaf) is not _Slot]

    def call(self, function: Callable[..., Any], tensors: list[Tensor], given: Given | None = None) -> Any:
        """The function on new containers with these tensors; the list is emptied, so that they die when they can.

        What it puts into lists, dicts and dataclasses or takes out of them, the caller's get too, if `given`.
        """
        if self._distinct:
            leaves = tensors.copy()
        else:
            leaves = [tensors[leaf.index] if type(leaf) is _Slot else leaf for leaf in self.leaves]
        tensors.clear()
        if isinstance(self.structure, _Flat):
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
        at = next(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, _Slot) and leaf.index == index)
        return self.structure.paths()[at].removeprefix("['").replace("']", "", 1)


# Neither containers nor records: most calls have no others.
_SURELY_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device})


@dataclasses.dataclass
class _Flat:
    """Arguments that are leaves themselves."""

    positional: int
    names: tuple[str, ...]

    def paths(self) -> list[str]:
        return [f"['args'][{i}]" for i in range(self.positional)] + [f"['kwargs'][{name!r}]" for name in self.names]


@dataclasses.dataclass
class _Structure:
    spec: pytree.TreeSpec
    records: dict[int, _Record]  # by their place among the leaves of spec

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = [
            self.records[i].build(leaves) if i in self.records else next(leaves) for i in range(self.spec.num_leaves)
        ]
        return pytree.tree_unflatten(parts, self.spec)

    def paths(self) -> list[str]:
        try:
            tree = pytree.tree_unflatten([_Slot(i) for i in range(self.spec.num_leaves)], self.spec)
            own = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
        except ValueError:  # a container registered without keys
            own = [f"['leaf {i} of the arguments']" for i in range(self.spec.num_leaves)]
        found: list[str] = []
        for i, path in enumerate(own):
            if i in self.records:
                found.extend(path + inner for inner in self.records[i].structure.paths())
            else:
                found.append(path)
        return found


@dataclasses.dataclass
class _Record:
    """A dataclass that holds tensors."""

    instance: Any
    structure: _Structure

    def build(self, leaves: Iterator[Any]) -> Any:
        new = copy.copy(self.instance)
        for name, value in self.structure.build(leaves).items():
            object.__setattr__(new, name, value)
        return new


def _flatten(tree: Any, above: tuple[int, ...], cycles: list[int]) -> tuple[list[Any], _Structure]:
    """The leaves of a tree, those of dataclasses that hold tensors among them, and how to build it again.

    `above` and `cycles`: the identities of the dataclasses around it, and of those that were met again within.
    """
    found: list[Any] = []
    records: dict[int, _Record] = {}
    own, spec = pytree.tree_flatten(tree)
    for i, leaf in enumerate(own):
        if _is_record(leaf) and id(leaf) not in above:
            inner, structure = _flatten(_fields(leaf), (*above, id(leaf)), cycles)
            if any(isinstance(value, Tensor) for value in inner):
                if id(leaf) in cycles:
                    raise ValueError(f"ckptfused.checkpoint: {CYCLE}, got a {type(leaf).__name__} that is")
                records[i] = _Record(leaf, structure)
                found.extend(inner)
                continue
        elif above and id(leaf) in above:
            cycles.append(id(leaf))
        found.append(leaf)
    return found, _Structure(spec, records)


def _is_record(leaf: Any) -> bool:
    # What is surely none comes first: torch 2.11 cannot trace the question.
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, Tensor, type, nn.Module))
    return not plain and dataclasses.is_dataclass(leaf)
