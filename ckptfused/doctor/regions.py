"""Calls of checkpoints, with the calls of modules in their forward and in their replays."""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class RegionEvent:
    """A call of a module begins or ends, or a checkpointed function computed what backward reads."""

    module: nn.Module | None
    """None: no call, but a tensor that is saved for backward, or the results of a reentrant checkpoint's function."""
    begins: bool
    values: tuple[Any, ...]
    """Fingerprints of its arguments, or of its results."""
    random: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the module and its surroundings where it begins."""
    sizes: tuple[Any, ...] = ()
    """Sums and norms of the values, where equal operations may have other bits."""

    @property
    def saved(self) -> bool:
        """Whether it is no call."""
        return self.module is None


@dataclass
class Region:
    """One call of a checkpoint: what its forward computed, and each replay."""

    owner: nn.Module | None
    """The module that it runs; None if that is not known."""
    inside: nn.Module | None
    """The module whose forward called the checkpoint."""
    reentrant: bool
    preserves: bool
    """Whether random states are replayed."""
    needs_grad: bool
    """Whether an argument requires a gradient."""
    arguments: list[tuple[str, Any, Any]]
    """Tensors that the checkpoint holds without a guard: their name, a reference, and their fingerprint."""
    forward: list[RegionEvent] = field(default_factory=list)
    replays: list[list[RegionEvent]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """The arguments that a replay found changed."""
    foreign: bool = False
    """Whether the checkpoint is nobody's that the doctor knows: it replays, and cannot be taken out."""


def owner_of(function: Any, depth: int = 4) -> nn.Module | None:
    """The module that a checkpointed function runs, as far as the function shows it."""
    if isinstance(function, nn.Module):
        return function
    if depth == 0 or function is None:
        return None
    if isinstance(function, functools.partial):
        given = next((arg for arg in function.args if isinstance(arg, nn.Module)), None)
        return owner_of(function.func, depth - 1) or given
    for name in ("__self__", "function", "layer"):  # a method; ckptfused's segment; a converted layer's forward
        value = getattr(function, name, None)
        if isinstance(value, nn.Module) or (name == "function" and callable(value)):
            return owner_of(value, depth - 1)
    cells = function.__closure__ or () if inspect.isfunction(function) else ()
    for cell in cells:
        with contextlib.suppress(ValueError):  # still empty
            value = cell.cell_contents
            if isinstance(value, nn.Module) or inspect.isroutine(value) or isinstance(value, functools.partial):
                found = owner_of(value, depth - 1)
                if found is not None:
                    return found
    return None


def keywords_of(function: Any) -> dict[str, Any]:
    """What a partial hands on."""
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        found = {**function.keywords, **found}
        function = function.func
    return found
