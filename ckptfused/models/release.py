"""An optimizer's updates in backward: each weight's as soon as its gradient is complete, which then goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, distributed, nn
from torch.optim import LBFGS, Optimizer

from ckptfused.checks import is_dtensor
from ckptfused.compat.torch_autograd import accept_scales, clipped_by
from ckptfused.layer.shards import holds_fsdp1


class Release:
    """The hooks by which an optimizer updates weights of a model in backward, from `begin` to `end`.

    A weight's hook runs the optimizer's own step on it alone and sets its gradient to None; the step that is called
    after backward finds none and says that the next backward may come. Weights of the optimizer that are frozen as the
    hooks are made, are another model's or are added later have their updates in that step, as always.

    step: what is done in the place of the optimizer's step of one weight, to which `param_groups` is narrowed.
    **Raises** `TypeError` for what is no optimizer or a wrapper of one; `ValueError` for LBFGS, for a model under FSDP1
    and for an optimizer of none of its weights. Hooks raise `RuntimeError` for what is no step of one batch.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, step: Callable[[], object] | None = None) -> None:
        _check(model, optimizer)
        self.optimizer = optimizer
        self._step = partial(type(optimizer).step, optimizer) if step is None else step
        own = set(model.parameters())
        self.weights = {
            p: index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if p in own and p.requires_grad
        }
        """What is updated in backward, and the places of their groups."""
        if not self.weights:
            raise ValueError("release: expected an optimizer of weights that the model trains, got one of none of them")
        self._handles: list[Any] = []
        self._updated: set[Tensor] = set()

    def begin(self) -> None:
        self._clipping = clipped_by(_refuse_clipping)
        self._clipping.__enter__()
        self._handles = [
            *(p.register_post_accumulate_grad_hook(partial(_update, ref(self))) for p in self.weights),
            self.optimizer.register_step_pre_hook(self._check_step),
            self.optimizer.register_step_post_hook(self._stepped),
        ]
        self._accepted = accept_scales(self.optimizer, True)
        _RELEASES.add(self)

    def end(self) -> None:
        self._clipping.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        accept_scales(self.optimizer, self._accepted)
        _RELEASES.discard(self)

    def __enter__(self) -> Release:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def update(self, p: Tensor) -> None:
        """Has the optimizer update a weight whose gradient is there, and lets the gradient go."""
        place = self.weights[p]
        with _ONE_AT_A_TIME:
            self._check_update(p)
            groups = self.optimizer.param_groups
            alone = {**groups[place], "params": [p]}
            self.optimizer.param_groups = _Narrowed([alone])
            try:
                self._step()
            finally:
                self.optimizer.param_groups = groups
            self._updated.add(p)
            p.grad = None
        written = [key for key, value in alone.items() if key != "params" and value is not groups[place].get(key)]
        if written:
            raise RuntimeError(
                f"release: expected an optimizer that keeps its state by weight, got {type(self.optimizer).__name__}, "
                f"whose step writes {', '.join(written)} of a whole group"
            )

    def _check_update(self, p: Tensor) -> None:
        if p in self._updated:
            raise RuntimeError(
                "release: expected optimizer.step() after each backward, got a second gradient of a weight that was "
                "updated: gradients cannot accumulate, over batches or in parts (a shared weight under a reentrant "
                "checkpoint); ckptfused.revert(model), or convert without release, ends the updates in backward"
            )
        joined = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if joined and not (p.is_meta or is_dtensor(p)):
            raise RuntimeError(
                "release: expected a model of one process or under FSDP2, got a weight whose gradient other ranks "
                "have yet to add theirs to (DDP, FSDP1, ZeRO)"
            )

    def _check_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if isinstance(optimizer.param_groups, _Narrowed):
            return
        if any(value is not None for value in (*args[1:], *options.values())):
            raise ValueError(
                "release: expected optimizer.step() without a closure, which runs backward within the step"
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "release: expected unscaled gradients, got those of a GradScaler, with which backward has updated the "
                "weights already: load them anew, and train in bfloat16, or without release"
            )

    def _stepped(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not isinstance(optimizer.param_groups, _Narrowed):
            self.begin_step()

    def begin_step(self) -> None:
        """Has each weight wait for a gradient again, as after the optimizer's step."""
        self._updated.clear()


class _Narrowed(list[dict[str, Any]]):
    """The groups of an optimizer while it updates one weight."""


_ONE_AT_A_TIME = threading.Lock()
"""For backward has a thread for each GPU."""
_RELEASES: WeakSet[Release] = WeakSet()
"""The releases that have begun. Their optimizers hold them; weights' hooks, in which Python finds no cycles, do not."""


def _update(release: ref[Release], p: Tensor) -> None:
    found = release()
    if found is not None:
        found.update(p)


def releases_of(model: nn.Module) -> list[Release]:
    """The releases by which weights of a model are updated in backward."""
    own = set(model.parameters())
    return [release for release in _RELEASES if not own.isdisjoint(release.weights)]


def released(
    model: nn.Module, optimizer: Optimizer | None, step: Callable[[], object] | None = None
) -> AbstractContextManager[object]:
    """A context in which an optimizer, if there is one, updates weights in backward, unless they are already."""
    return nullcontext() if optimizer is None or releases_of(model) else Release(model, optimizer, step)


def end_releases(model: nn.Module) -> None:
    """Has the weights of a model updated by the optimizer's step again."""
    for release in releases_of(model):
        release.end()


def _refuse_clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's clipping, for parameters whose gradients are there."""

    def checked(parameters: Iterable[Tensor], *args: Any) -> Any:
        parameters = list(parameters)
        if any(p in release.weights for release in _RELEASES for p in parameters):
            raise RuntimeError(
                "release: expected gradients that are not clipped by their norm, which is known after backward, got "
                "clip_grad_norm_ of weights that backward has updated (max_grad_norm=0 turns it off in a Trainer)"
            )
        return clip(parameters, *args)

    return checked


def _check(model: nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer) or "param_groups" not in vars(optimizer):
        raise TypeError(
            "release: expected the torch.optim.Optimizer that trains the model, itself and no wrapper of it "
            f"(accelerate's has it as .optimizer), got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError("release: expected an optimizer that takes each weight alone, got LBFGS")
    if holds_fsdp1(model):
        raise ValueError("release: expected a model of one process or under FSDP2, got FSDP1, whose weights are flat")
