"""The `forward` that a converted layer carries: an attribute of the instance, so class, name and tree stay."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ckptfused.checkpoint import checkpoint
from ckptfused.convert.family import FAMILIES
from ckptfused.convert.hugging_face import cache_reason, is_cache
from ckptfused.convert.parts import Reason

# Arguments by which layers hand on a key/value cache.
CACHES = ("past_key_values", "layer_past", "past_key_value")


class ConvertedForward:
    """Runs a layer as one fused op where that is safe at this call, else its own forward, checkpointed.

    Everything is looked up at the call: weights, dropout probabilities, adapters, hooks. `family` None: always
    generic. Pickles and deep-copies with its layer.
    """

    def __init__(self, layer: nn.Module, family: str | None, keep: str, before: Any = None) -> None:
        self.layer = layer
        self.family = family
        self.keep = keep
        self.before = before
        """A forward that the instance had already (offload hooks, a patch): it runs, checkpointed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = Reason("no adapter for this class")
        if self.family is not None:
            result = FAMILIES[self.family].run(self.layer, self.keep, args, kwargs)
            if not isinstance(result, Reason):
                return result
            reason = result
        return self.unfused(reason, args, kwargs)

    def unfused(self, reason: Reason, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own forward, checkpointed unless the reason forbids it or it checkpoints itself."""
        layer = self.layer
        forward = self.before or functools.partial(type(layer).forward, layer)
        own = getattr(layer, "gradient_checkpointing", False) and layer.training
        caches = [a for a in args if is_cache(a)]
        caches += [v for k, v in kwargs.items() if v is not None and (k in CACHES or is_cache(v))]
        in_use = any(not is_cache(c) or cache_reason(layer, c) is not None for c in caches)
        if reason.original or own or in_use or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A replay would write to the cache a second time. As Hugging Face's own checkpointing does:
        args = tuple(None if is_cache(a) else a for a in args)
        kwargs = {k: None if k in CACHES or is_cache(v) else v for k, v in kwargs.items()}
        return checkpoint(forward, *args, **kwargs)
