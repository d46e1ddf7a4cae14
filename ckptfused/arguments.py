"""The arguments of a call, taken apart into tensors and the rest, and put together again in new containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


class _Slot:
    """Stands for a tensor among the leaves, by the tensor's index."""

    def __init__(self, index: int) -> None:
        self.index = index


class Arguments:
    """The arguments of one call as they were given: what containers held then, tensors by their index."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.structure = _flatten({"args": args, "kwargs": kwargs}, ())

    def take_tensors(self) -> list[Tensor]:
        """The distinct tensors; places remain."""
        tensors: list[Tensor] = []
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                at = next((j for j, t in enumerate(tensors) if t is leaf), len(tensors))
                if at == len(tensors):
                    tensors.append(leaf)
                self.leaves[i] = _Slot(at)
        return tensors

    def call(self, function: Callable[..., Any], tensors: list[Tensor]) -> Any:
        """The function on new containers with these tensors; the list is emptied, so that they die when they can."""
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        tensors.clear()
        tree = self.structure.build(iter(leaves))
        del leaves
        return function(*tree.pop("args"), **tree.pop("kwargs"))

    def name(self, index: int) -> str:
        """Where the tensor with this index was first given: `args[1][0]`, `kwargs['mask']`."""
        at = next(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, _Slot) and leaf.index == index)
        return self.structure.paths()[at].removeprefix("['").replace("']", "", 1)


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


def _flatten(tree: Any, above: tuple[int, ...]) -> tuple[list[Any], _Structure]:
    """The leaves of a tree, those of dataclasses that hold tensors among them, and how to build it again."""
    found: list[Any] = []
    records: dict[int, _Record] = {}
    own, spec = pytree.tree_flatten(tree)
    for i, leaf in enumerate(own):
        if _is_record(leaf) and id(leaf) not in above:
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
            inner, structure = _flatten(fields, (*above, id(leaf)))
            if any(isinstance(value, Tensor) for value in inner):
                records[i] = _Record(leaf, structure)
                found.extend(inner)
                continue
        found.append(leaf)
    return found, _Structure(spec, records)


def _is_record(leaf: Any) -> bool:
    # What is surely none comes first: torch 2.11 cannot trace the question.
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, Tensor, type, nn.Module))
    return not plain and dataclasses.is_dataclass(leaf)
