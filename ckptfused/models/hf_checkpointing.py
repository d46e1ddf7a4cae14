"""Hugging Face's own gradient checkpointing, around layers that checkpoint already.

From transformers 5.23 it is in the `forward` of a layer's class, which a converted layer's own comes before. Until
5.22 it is in `__call__`, which Python looks up on the class, never on an instance: there, the one `__call__` that all
its layers inherit lets converted layers through to what it is around. It stays as it was for all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ckptfused.compat.patches import LOCK
from ckptfused.compat.torch_modules import REPLICATE
from ckptfused.compat.transformers import (
    beneath_checkpoint,
    checkpoint_of,
    checkpointing_layer,
    checkpoints_with_cache,
    is_checkpointing_layer,
)

# Arguments by which layers hand on a key/value cache.
CACHES = ("past_key_values", "layer_past", "past_key_value", "cache_params")


NOT_REPLICATED = (
    "nn.DataParallel cannot replicate a converted layer: expected DistributedDataParallel or FSDP, one process a GPU "
    "(torchrun, accelerate launch)"
)


class NotReplicated:
    """Refuses, as a converted layer's `REPLICATE`, by which it is known: all replicas would run its own weights."""

    def __call__(self) -> nn.Module:
        raise RuntimeError(f"{NOT_REPLICATED}; or undo the conversion with ckptfused.revert(model)")


def let_converted_through() -> None:
    """Has Hugging Face's layers call a converted one directly, where they would checkpoint it once more."""
    base = checkpointing_layer()
    if base is None:
        return
    with LOCK:
        theirs = vars(base).get("__call__")
        if theirs is None or hasattr(theirs, "lets_converted_through"):
            return

        @functools.wraps(theirs)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(getattr(self, REPLICATE)) is NotReplicated and "forward" in self.__dict__:
                return super(base, self).__call__(*args, **kwargs)
            return theirs(self, *args, **kwargs)

        call.lets_converted_through = True  # type: ignore[attr-defined]
        base.__call__ = call


def checkpoints_itself(layer: nn.Module) -> bool:
    """Whether Hugging Face's checkpointing is switched on for this layer."""
    return bool(getattr(layer, "gradient_checkpointing", False)) and layer.training


def as_it_would(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`forward` as a layer runs it that `checkpoints_itself`, be it in `__call__`, which was not entered, or there."""
    checkpoint = checkpoint_of(layer)
    if checkpoint is None or not is_checkpointing_layer(layer) or not _in_call():
        return forward(*args, **kwargs)
    return checkpoint(functools.partial(forward, **_without_cache(layer, kwargs)), *args)


def in_place_of_checkpoint(
    run: Callable[..., Any], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`run` of the forward of a layer that `checkpoints_itself`, with the arguments that its checkpoint would give it.

    A layer whose checkpoint is elsewhere, in a forward of its own, is run with it.
    """
    cls = type(layer)
    forward = None
    if is_checkpointing_layer(layer):
        forward = cls.forward if _in_call() else beneath_checkpoint(cls)
    if forward is None:
        return cls.forward(layer, *args, **kwargs)
    return run(functools.partial(forward, layer), *args, **_without_cache(layer, kwargs))


def _in_call() -> bool:
    return "__call__" in vars(checkpointing_layer())


def _without_cache(layer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    if not checkpoints_with_cache(layer):
        kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    return kwargs
