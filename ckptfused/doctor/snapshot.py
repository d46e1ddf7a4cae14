"""Everything that a training step changes, and how it is put back."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.doctor.fingerprints import bits_equal, local, unrecorded
from ckptfused.generic.draws import is_generator, restore, state_of
from ckptfused.generic.reach import reach

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# Modules of these keep their own books of what they sharded and reduced.
_THEIR_OWN = ("torch.distributed", "torch.nn.parallel", "deepspeed")


class Snapshot:
    """A model's parameters, gradients, buffers and attributes, and all generators, as they are now.

    `restore` puts them back, to the bit, any number of times. **Saves** a copy of the parameters on the host, and of
    buffers, gradients and other tensors that modules hold where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._generators = list(_global_generators())
        self._hooks: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        for p in model.parameters():
            self._keep(p, on_host=True)
            self._gradients.append((p, p.grad))
            if p.grad is not None:
                self._keep(p.grad)
            hooks = getattr(p, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._hooks.append((hooks, dict(hooks)))
        for module in model.modules():
            self._module(module)
        self._states = [(g, state_of(g)) for g in {id(g): g for g in self._generators}.values()]

    def _module(self, module: nn.Module) -> None:
        held = vars(module)
        theirs = keeps_books(module)
        managed = held.get("_is_fsdp_managed_module") or theirs
        if not managed:
            self._containers.append((held, dict(held)))
        for name, value in held.items():
            if name != "_parameters" and not (theirs and name != "_buffers"):
                self._look_at(value)

    def _look_at(self, value: Any, depth: int = 1) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._keep(value)
        elif holds_state(value):
            self._generators.append(value)
        elif isinstance(value, types.FunctionType | functools.partial):  # a forward or a hook
            self._generators += reach([value]).generators
        elif isinstance(value, (*_CONTAINERS, tuple)) and depth < 6:
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                self._containers.append((value, _content(value)))
            values: Any = value.values() if isinstance(value, dict) else value
            for inner in list(values):
                self._look_at(inner, depth + 1)

    def _keep(self, t: Tensor, on_host: bool = False) -> None:
        own = local(t)
        if id(t) in self._seen or own is None or own.is_meta:
            return
        self._seen.add(id(t))
        with unrecorded():
            self._values.append((t, own.to("cpu", copy=True) if on_host else own.clone()))

    def begin(self) -> None:
        """Takes away gradients, and hooks that step an optimizer as soon as a gradient is there."""
        for p, _ in self._gradients:
            p.grad = None
        for hooks, _ in self._hooks:
            hooks.clear()

    def restore(self) -> None:
        """Puts everything back, ready for another step."""
        self.begin()
        for held, content in self._containers:
            _put(held, content)
        with unrecorded():
            for t, value in self._values:
                now = local(t)
                if now is not None and now.shape == value.shape and not bits_equal(now.to(value.device), value):
                    now.copy_(value)
        for g, state in self._states:
            restore(g, state)

    def finish(self) -> None:
        """Puts everything back."""
        self.restore()
        for p, grad in self._gradients:
            p.grad = grad
        for hooks, held in self._hooks:
            hooks.update(held)


def keeps_books(module: nn.Module) -> bool:
    """Whether a module's attributes are its library's own affair."""
    return type(module).__module__.startswith(_THEIR_OWN)


def holds_state(value: Any) -> bool:
    """Whether a value is a generator."""
    kind: Any = type(value)
    return is_generator(kind)


def _content(held: Any) -> Any:
    return dict(dict.items(held)) if isinstance(held, dict) else list(held)


def _put(held: Any, content: Any) -> None:
    """Has a container hold what it held, touching nothing where that is so."""
    base: Any = next(base for base in _CONTAINERS if isinstance(held, base))
    now = _content(held)
    if isinstance(content, dict):
        same = list(now) == list(content) and all(now[key] is content[key] for key in content)
        if same:
            return
        for key in now.keys() - content.keys():
            base.__delitem__(held, key)
        if list(base.keys(held)) != [key for key in content if key in now]:
            base.clear(held)
        for key, value in content.items():
            base.__setitem__(held, key, value)
    elif len(now) != len(content) or not all(a is b for a, b in zip(now, content, strict=True)):
        base.clear(held)
        (base.update if base is set else base.extend)(held, content)


def _global_generators() -> Iterator[Any]:
    """PyTorch's default ones, Python's, and NumPy's where it is in use."""
    yield torch.default_generator
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield from torch.cuda.default_generators
    yield random._inst  # type: ignore[attr-defined]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.random.__self__


def generator_states() -> tuple[int, ...]:
    """A number for each global generator, the same where it is in the same state."""
    return tuple(map(number, _global_generators()))


def number(g: Any) -> int:
    """A number for a generator's state."""
    state = state_of(g)
    if isinstance(state, Tensor):
        return hash(state.numpy().tobytes())
    return hash(pickle.dumps(state)) if isinstance(state, dict) else hash(state)
