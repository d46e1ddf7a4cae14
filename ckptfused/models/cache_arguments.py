"""Key/value caches among what a layer is called with: which hold something, and what becomes of those that do not.

In training a call is the same with and without gradients. Without, an empty cache is filled; with gradients it is left
empty, as under Hugging Face's own checkpointing, since a replay would write to it once more.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.layer.parts import Reason
from ckptfused.models.hf_checkpointing import CACHES


def cache_reason(layer: nn.Module, cache: Any, index: int | None) -> Reason | None:
    """Why a call with this cache runs the original forward; None where it is fused. index: the layer's in the cache."""
    if cache is None or (layer.training and not _in_use(cache, index)):
        return None
    return Reason("a key/value cache is in use", original=True)


def to_fill(cache: Any) -> Any:
    """The cache that a layer's own modules fill at this call, None if none."""
    return None if torch.is_grad_enabled() else cache


def keeper(cache: Any, index: int | None) -> Callable[[Tensor, Tensor], object] | None:
    """Takes the keys and values of a layer's self-attention, as its own would hand them on; None where nothing does."""
    cache = to_fill(cache)
    if cache is None:
        return None
    return partial(_update, getattr(cache, "self_attention_cache", cache), index)


def _update(cache: Any, index: int | None, k: Tensor, v: Tensor) -> None:
    cache.update(k, v, index)


def left_empty(
    layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a layer's forward without their caches and told so (`use_cache`), for a call that is replayed.

    None where that cannot be: a cache holds something, or cannot say that it does not.
    """
    caches = caches_among(args, kwargs)
    if not caches:
        return args, kwargs
    if not layer.training or any(_in_use(cache, _index(layer)) for cache in caches):
        return None
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value, name) else value for name, value in kwargs.items()}
    names = list(inspect.signature(forward).parameters)
    if "use_cache" in names[: len(args)]:
        place = names.index("use_cache")
        return (*args[:place], False, *args[place + 1 :]), kwargs
    if "use_cache" in (*names, *kwargs):
        kwargs["use_cache"] = False
    return args, kwargs


def fill(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> None:
    """A layer's own forward fills its empty cache, where there are no gradients, and goes no further than that.
    The generators stay as they are. x: the layer's input.
    """
    if torch.is_grad_enabled() or not caches_among(args, kwargs):
        return
    args = tuple(_stopping(value) if _is_cache(value) else value for value in args)
    kwargs = {name: _stopping(value) if _is_cache(value, name) else value for name, value in kwargs.items()}
    drawn = not torch.compiler.is_compiling()
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices, drawn), contextlib.suppress(_FilledError):
        type(layer).forward(layer, *args, **kwargs)


class _FilledError(Exception):
    """A cache has what it was to have."""


def _stopping(cache: Any) -> Any:
    """A cache that is another's, and raises `_FilledError` once it was given keys and values."""
    made = copy.copy(cache)

    def update(*args: Any, **kwargs: Any) -> Any:
        cache.update(*args, **kwargs)
        raise _FilledError

    made.update = update
    return made


def _index(layer: nn.Module) -> int | None:
    """The place of a layer in a cache, where a module of it says so."""
    return next((vars(m)["layer_idx"] for m in layer.modules() if type(vars(m).get("layer_idx")) is int), None)


def caches_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The caches that a layer's forward is called with."""
    return [value for value in args if _is_cache(value)] + [v for name, v in kwargs.items() if _is_cache(v, name)]


def _is_cache(value: Any, name: str = "") -> bool:
    """Whether an argument is a cache: it says how much it holds, is called one, or is handed on as one."""
    if value is None or isinstance(value, Tensor | nn.Module):
        return False
    if name in CACHES:
        return True
    if isinstance(value, bool | int | float | str | tuple | list | dict):
        return False
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")


def _in_use(cache: Any, index: int | None = None) -> bool:
    """Whether a cache holds something, for the layer of this index if one is given, or has places for what will come,
    which masks cover (`StaticCache`); one that cannot say so may.
    """
    if any(hasattr(layer, "max_cache_len") for layer in getattr(cache, "layers", ())):
        return True
    try:
        return bool(cache.get_seq_length() if index is None else cache.get_seq_length(index))
    except Exception:  # of many kinds: it has no such method, or its layers have no length
        return True
