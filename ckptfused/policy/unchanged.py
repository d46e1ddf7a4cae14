"""Steps that leave no trace: what they change of a model, its optimizer and the generators is put back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ckptfused.generic.draws import restore, state_of

Simple = int | float | str | bool | None


class Unchanged:
    """Within it steps may run; afterwards everything is to the bit what it was, and gradients are the same tensors.

    Those are parameters, buffers, gradients, plain numbers that modules hold, the optimizer's state, and the states of
    PyTorch's generators, Python's, NumPy's and those that modules hold. Copies of what a GPU holds are on the host.
    Within it there are no gradients.
    """

    def __init__(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        given = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
        self._leaves = [t for t in (*model.parameters(), *given) if t.is_leaf]

    def __enter__(self) -> Unchanged:
        self._drawn = drawn_alike(self._model)
        self._drawn.__enter__()
        self._grads = [(t, t.grad) for t in self._leaves]
        for t in self._leaves:
            t.grad = None
        self._modules = [
            (m, dict(m._buffers), {k: v for k, v in vars(m).items() if isinstance(v, Simple)})
            for m in self._model.modules()
        ]
        owned = [*self._model.parameters(), *self._model.buffers()]
        self._values = [(t, _copy(t)) for t in {id(t): t for t in owned}.values()]
        self._state = None if self._optimizer is None else _OptimizerState(self._optimizer)
        return self

    def __exit__(self, *exception: Any) -> None:
        for module, buffers, simple in self._modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).update(simple)
        with torch.no_grad():
            for t, value in self._values:
                t.copy_(value)
        if self._state is not None:
            self._state.put_back()
        for t, grad in self._grads:
            t.grad = grad
        self._drawn.__exit__(*exception)


@contextlib.contextmanager
def drawn_alike(model: nn.Module) -> Iterator[None]:
    """Afterwards all generators are as they were, so that what follows draws the same numbers."""
    states = [(g, state_of(g)) for g in _generators(model)]
    try:
        yield
    finally:
        for generator, state in states:
            restore(generator, state)


class _OptimizerState:
    """What an optimizer holds, tensors with their values."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: _held(values) for p, values in optimizer.state.items()}
        self._groups = [_held(group) for group in optimizer.param_groups]
        self._rest = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}

    def put_back(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update({p: _given_back(values) for p, values in self._state.items()})
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(_given_back(values))
        for name in vars(self._optimizer).keys() - self._rest.keys() - {"state", "param_groups"}:
            delattr(self._optimizer, name)
        vars(self._optimizer).update(self._rest)


def _held(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value, and a copy of a tensor's."""
    return {k: (v, _copy(v) if isinstance(v, Tensor) else None) for k, v in values.items()}


def _given_back(values: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    with torch.no_grad():
        for value, copy in values.values():
            if copy is not None:
                value.copy_(copy)
    return {name: value for name, (value, _) in values.items()}


def _copy(t: Tensor) -> Tensor:
    return t.detach().to("cpu", copy=True)


def _generators(model: nn.Module) -> Iterator[Any]:
    yield torch.default_generator
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield from torch.cuda.default_generators
    yield random._inst  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield numpy.random.__self__
    for module in model.modules():
        yield from (v for v in vars(module).values() if isinstance(v, torch.Generator | random.Random))
