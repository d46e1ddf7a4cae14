"""What `torch.compile` is told of functions without importing Dynamo, which takes a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def constant_result(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.assume_constant_result`, which sets the same mark.

    PyTorch 2.11 to 2.13: `_dynamo_marked_constant`.
    """
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
