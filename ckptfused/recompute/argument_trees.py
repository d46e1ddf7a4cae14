"""How arguments are taken apart into leaves, and put together again in new containers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat import pytree

CYCLE = "expected arguments that can be copied, with no container that is among its own contents"


class TensorSlot:
    """Stands for a tensor among the leaves, by the tensor's index."""

    def __init__(self, index: int) -> None:
        self.index = index


# Neither containers nor records: most calls have no others.
SURELY_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device})


def are_leaves(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= SURELY_LEAVES


@dataclasses.dataclass
class FlatArguments:
    """Arguments that are leaves themselves."""

    positional: int
    names: tuple[str, ...]

    def paths(self) -> list[str]:
        return [f"['args'][{i}]" for i in range(self.positional)] + [f"['kwargs'][{name!r}]" for name in self.names]


@dataclasses.dataclass
class _Plain:
    """A list, tuple or dict of leaves and of such containers, which is built again sooner than by its `TreeSpec`."""

    kind: type
    keys: tuple[Any, ...]
    parts: list[_Plain | None] | None
    """None for a leaf; None where all are."""

    def build(self, leaves: Iterator[Any]) -> Any:
        if self.parts is None:
            values: Iterable[Any] = itertools.islice(leaves, len(self.keys))
        else:
            values = [next(leaves) if part is None else part.build(leaves) for part in self.parts]
        return dict(zip(self.keys, values, strict=True)) if self.kind is dict else self.kind(values)

    def paths(self) -> list[str]:
        parts = self.parts or [None] * len(self.keys)
        found = ([""] if part is None else part.paths() for part in parts)
        return [f"[{key!r}]{path}" for key, paths in zip(self.keys, found, strict=True) for path in paths]


def _flatten_plain(value: Any, leaves: list[Any]) -> _Plain | None:
    """How to build such a container again, once its leaves are among these; None of any other."""
    kind = type(value)
    if kind is dict:
        keys, values = tuple(value), [*value.values()]
    elif kind is list or kind is tuple:
        keys, values = tuple(range(len(value))), value
    else:
        return None
    if are_leaves(values):
        leaves += values
        return _Plain(kind, keys, None)
    parts: list[_Plain | None] = []
    for inner in values:
        if type(inner) in SURELY_LEAVES:
            leaves.append(inner)
            parts.append(None)
        elif (part := _flatten_plain(inner, leaves)) is not None:
            parts.append(part)
        else:
            return None
    return _Plain(kind, keys, parts)


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
            tree = pytree.tree_unflatten([TensorSlot(i) for i in range(self.spec.num_leaves)], self.spec)
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
        if is_dataclass_instance(leaf) and id(leaf) not in above:
            inner, structure = _flatten(record_fields(leaf), (*above, id(leaf)), cycles)
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


def is_dataclass_instance(leaf: Any) -> bool:
    # What is surely none comes first: torch 2.11 cannot trace the question.
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, Tensor, type, nn.Module))
    return not plain and dataclasses.is_dataclass(leaf)


def record_fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}


ArgumentTree = _Plain | _Structure


def taken_apart(tree: Any) -> tuple[list[Any], ArgumentTree]:
    """The leaves of a tree, those of dataclasses that hold tensors among them, and how to build it again."""
    leaves: list[Any] = []
    plain = _flatten_plain(tree, leaves)
    return _flatten(tree, (), []) if plain is None else (leaves, plain)
