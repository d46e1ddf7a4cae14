"""Random generators beside the default ones of PyTorch's devices, which its own checkpoint replays."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@functools.lru_cache(maxsize=4096)
def is_generator(kind: Any) -> bool:
    """Whether instances draw random numbers from a state that can be had and set."""
    return issubclass(kind, _kinds()) and not issubclass(kind, random.SystemRandom)


def _kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy.random")
    others = () if numpy is None else (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    return (torch.Generator, random.Random, *others)


def behind(value: Any, code_names_random: bool) -> Any:
    """The generator that a function draws from by way of a global: the module `random`, NumPy's, or a method of one."""
    if value is random:
        return random.random.__self__  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and (value is numpy or (code_names_random and value is sys.modules["numpy"])):
        return numpy.random.__self__
    owner = getattr(value, "__self__", None)
    kind: Any = type(owner)
    return owner if is_generator(kind) else None


def global_generators() -> Iterator[Any]:
    """PyTorch's default ones, Python's, and NumPy's where it is in use."""
    yield torch.default_generator
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield from torch.cuda.default_generators
    yield random.random.__self__  # type: ignore[attr-defined]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.random.__self__


@contextmanager
def undrawn(others: Iterable[Any] = ()) -> Iterator[None]:
    """A context that may draw from the global generators and others; afterwards they are where they were."""
    states = [(g, state_of(g)) for g in (*global_generators(), *others)]
    try:
        yield
    finally:
        for g, state in states:
            restore(g, state)


def is_default(g: Any) -> bool:
    """Whether PyTorch's own checkpoint replays it."""
    return g is torch.default_generator or any(g is other for other in torch.cuda.default_generators)


def is_global(g: Any) -> bool:
    """Whether it is that of the module `random`, or NumPy's."""
    numpy = sys.modules.get("numpy.random")
    return g is random.random.__self__ or (numpy is not None and g is numpy.random.__self__)  # type: ignore[attr-defined]


def state_of(g: Any) -> Any:
    """What `restore` takes."""
    if isinstance(g, torch.Generator):
        return g.get_state()
    if isinstance(g, random.Random):
        return g.getstate()
    if hasattr(g, "get_state"):
        return g.get_state(legacy=False)
    return getattr(g, "bit_generator", g).state


def restore(g: Any, state: Any) -> None:
    """Has it draw again what it drew from that state."""
    if isinstance(g, torch.Generator):
        g.set_state(state)
    elif isinstance(g, random.Random):
        g.setstate(state)
    elif hasattr(g, "set_state"):
        g.set_state(state)
    else:
        getattr(g, "bit_generator", g).state = state


class RngStates:
    """Generators with the states that a forward found."""

    def __init__(self, generators: list[Any]) -> None:
        self._found = [(g, state_of(g)) for g in {id(g): g for g in generators}.values()]

    def settle(self) -> None:
        """After the forward: forgets those that drew nothing."""
        self._found = [(g, found) for g, found in self._found if not _same(found, state_of(g))]

    def rewind(self) -> list[tuple[Any, Any]]:
        """For a replay; what `forward` takes, after it."""
        now = [(g, state_of(g)) for g, _ in self._found]
        for g, found in self._found:
            restore(g, found)
        return now

    @staticmethod
    def forward(states: list[tuple[Any, Any]]) -> None:
        """After a replay: they go on from these states."""
        for g, state in states:
            restore(g, state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a, "tolist"):
        return bool((a == b).all())
    return bool(a == b)
