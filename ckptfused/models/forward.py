"""The `forward` that a converted layer carries: an attribute of the instance, so class, name and tree stay."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.checks import transformed
from ckptfused.layer.hooks import lent_weights
from ckptfused.layer.parts import Reason
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.layer.shards import gathered, refuse_tensor_parallel
from ckptfused.layer.spec_text import Mode
from ckptfused.models.cache_arguments import left_empty
from ckptfused.models.derive.compiled import known_to_compiler
from ckptfused.models.experts.read import is_experts
from ckptfused.models.experts.routing import routes_once, run_once
from ckptfused.models.family import FAMILIES
from ckptfused.models.heads.loss_forward import HeadForward, installed
from ckptfused.models.hf_checkpointing import (
    as_it_would,
    checkpoints_itself,
    in_place_of_checkpoint,
    let_converted_through,
)
from ckptfused.offload import Offloader, saving
from ckptfused.ops.enclosing_checkpoint import hidden_from_it
from ckptfused.recompute.joined_calls import NotChainedError, Segment, chained, goes_on, may_be_chained, not_made_again
from ckptfused.recompute.per_thread_tensors import entered

_NOTHING = contextlib.nullcontext()


class ConvertedForward:
    """Runs a layer as one fused op where that is safe at this call, else its own forward, checkpointed.

    Everything is looked up at the call: weights, dropout probabilities, adapters, hooks. `family` None: always
    generic. Pickles and deep-copies with its layer.
    """

    checkpoints = True
    """For whoever calls a layer and would checkpoint it."""

    offloader: Offloader | None = None

    def __init__(
        self,
        layer: nn.Module,
        family: str | None,
        mode: Mode | None,
        before: Any = None,
        offloader: Offloader | None = None,
        segment: Segment | None = None,
        name: str = "",
    ) -> None:
        self.layer = layer
        self.family = family
        self.mode = mode
        """None: it runs as it was, in a segment that is replayed."""
        self.before = before
        """A forward that the instance had already (offload hooks, a patch): it runs, checkpointed."""
        self.offloader = offloader
        """For its input between forward and backward; None: it stays on the device."""
        self.paused = False
        """Whether `original` is at work on this layer."""
        self.segment = segment
        """Layers that save one input together; None: each for itself."""
        self.name = name
        self._enter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter()

    def _enter(self) -> None:
        let_converted_through()
        known_to_compiler(self.layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.segment is not None and not self.paused and not transformed():
            x = self._input(args, kwargs)
            if may_be_chained(args, kwargs, x):
                return self._in_segment(self.segment, x, args, kwargs)
        return self.alone(*args, **kwargs)

    def _in_segment(self, segment: Segment, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = not goes_on(segment, x)
        if first:
            segment.warn(self.name)
        if lent_weights(self.layer, by_fsdp1=True):
            segment.say(f"{self.name} has other weights in a replay (FSDP1, functional_call): it saves its own input")
        elif not under_foreign_mode():
            with contextlib.suppress(NotChainedError), self._saving(args, kwargs) if first else _NOTHING:
                function = self.alone if self.mode is not None else self._as_it_was
                around = functools.partial(gathered, self.layer)
                return chained(segment, function, self.layer, args, kwargs, x, around)
        return self.alone(*args, **kwargs)

    def _as_it_was(self, *args: Any, **kwargs: Any) -> Any:
        """It may write to its first argument, which is saved."""
        name = _first(type(self.layer).forward)
        args, kwargs = (
            (args[0].clone(), *args[1:]) if args else args,
            kwargs if args else {**kwargs, name: kwargs[name].clone()},
        )
        return self.alone(*args, **kwargs)

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's call as it is without segments."""
        if self.paused:
            return self.unfused(Reason("the original layers are asked for", original=True), args, kwargs)
        reason = Reason("no adapter for this class")
        if self.mode is None:
            reason = Reason("as it was, says the policy", original=True)
        elif transformed():
            reason = Reason("a torch.func transform or a forward-mode derivative is taken, or a trace", original=True)
        elif self.family is not None:
            with self._saving(args, kwargs), hidden_from_it(self.layer, self.mode.inputs_alone):
                result = FAMILIES[self.family].run(self.layer, self.mode, args, kwargs)
            if not isinstance(result, Reason):
                return result
            reason = result
        return self.unfused(reason, args, kwargs)

    def unfused(self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own forward, checkpointed unless the reason forbids it or it checkpoints itself.

        With experts that save their inputs alone it runs once in either case.
        """
        layer = self.layer
        refuse_tensor_parallel(layer, apart=is_experts)
        if self.family is not None and not self.paused:
            FAMILIES[self.family].refuse_original(layer, reason.text)
        forward = self.before or functools.partial(type(layer).forward, layer)
        x = self._input(args, kwargs)
        not_ours = reason.original or not torch.is_grad_enabled() or lent_weights(layer) or under_foreign_mode()
        if checkpoints_itself(layer):
            not_made_again()
            with self._saving(args, kwargs):
                if not_ours or self.before is not None or not routes_once(layer, x):
                    return as_it_would(layer, forward, args, kwargs)
                with hidden_from_it(layer):
                    return in_place_of_checkpoint(functools.partial(run_once, layer, x), layer, args, kwargs)
        if not_ours:
            if self.mode is not None:
                not_made_again()
            with entered():
                return forward(*args, **kwargs)
        given = left_empty(layer, forward, args, kwargs)
        if given is None:
            not_made_again()
            return forward(*args, **kwargs)
        args, kwargs = given
        with self._saving(args, kwargs), hidden_from_it(layer):
            if self.before is None and routes_once(layer, x):
                return run_once(layer, x, forward, *args, **kwargs)
            return checkpoint(same_sdpa(forward), *args, **kwargs)

    def _saving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Around what saves the layer's input, which is the first argument."""
        if self.offloader is None or torch.compiler.is_compiling():
            return _NOTHING
        return saving(self.offloader, self._input(args, kwargs))

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else kwargs.get(_first(type(self.layer).forward))


@functools.cache
def _first(forward: Callable[..., Any]) -> str:
    """The name of a forward's first argument."""
    return [*inspect.signature(forward).parameters, ""][1]


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """A context in which converted layers run as they were, neither fused nor checkpointed by ckptfused.

    For comparing, and for what somebody wants of the layer's own code. What was computed within may be differentiated
    after. Second derivatives (a gradient penalty), `torch.func` and forward-mode derivatives need no such help.

    **Raises** `TypeError` if `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    forwards = (vars(module).get("forward") for module in model.modules())
    found: list[ConvertedForward | HeadForward] = [f for f in forwards if isinstance(f, ConvertedForward)]
    found += filter(None, map(installed, model.modules()))
    before = [forward.paused for forward in found]
    for forward in found:
        forward.paused = True
    try:
        yield
    finally:
        for forward, was in zip(found, before, strict=True):
            forward.paused = was
