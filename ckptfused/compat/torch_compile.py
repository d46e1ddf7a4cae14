"""What `torch.compile` is told of functions without importing Dynamo, which takes a second: PyTorch 2.11 to 2.13."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ckptfused.compat import patches

_P = ParamSpec("_P")
_R = TypeVar("_R")

dynamo_at_work: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What looks at the frames that this thread opens; None where Dynamo does not. `get_eval_frame_callback`."""


def not_disabled(function: Any) -> Any:
    """The function from which `torch.compiler.disable` made this one; this one if it did not.
    `_torchdynamo_orig_callable`."""
    original = getattr(function, "_torchdynamo_orig_callable", None)
    # A wrapper around what it made has a copy of the attribute.
    return function if original is None or function.__wrapped__ is not original else original


def constant_result(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.assume_constant_result`, which sets the same mark. `_dynamo_marked_constant`."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def in_graph(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.allow_in_graph`, of which Dynamo hears when it first traces a call."""

    @constant_result
    def allow() -> None:
        torch.compiler.allow_in_graph(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            allow()
        return function(*args, **kwargs)

    return call


def partitioner_budget() -> float:
    """The part of activations that the partitioner of compiled graphs may keep, 1 unless somebody set it.
    `torch._functorch.config.activation_memory_budget`."""
    config: Any = sys.modules.get("torch._functorch.config")
    return 1.0 if config is None else config.activation_memory_budget


def load_dynamo() -> None:
    """Imports Dynamo. PyTorch does so within the first call that a mode of the dispatcher sees, under that mode, so
    that it sees what the import computes. `torch._compile`."""
    import torch._dynamo  # noqa: F401


def told_of_calls(tell: Callable[[], object]) -> AbstractContextManager[None]:
    """A context in which calls that this thread makes of compiled functions are told of. `_callback_from_stance`, which
    each of them asks what to do with the frames that it opens."""
    import torch._dynamo.eval_frame as eval_frame

    def told(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(callback: Any) -> Any:
            if callable(callback):  # not one by which Dynamo is told to keep out
                tell()
            return plain(callback)

        return ask

    return patches.patched_attribute(eval_frame, "_callback_from_stance", patches.here(told))


def is_loaded() -> bool:
    """Whether anything may have been compiled: Dynamo was imported. `torch._dynamo`."""
    return "torch._dynamo" in sys.modules


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that Dynamo leaves alone. Where a graph breaks around code, that runs, and what it calls is traced."""
    return _disabled(function) if dynamo_at_work() is not None else function


@functools.lru_cache(maxsize=16)
def _disabled(function: Any) -> Any:
    return torch.compiler.disable(function)
