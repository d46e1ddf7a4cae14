"""Functions of PyTorch's that a mode sees as one call, with their own code for a mode that wants to see inside."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

# True of PyTorch 2.11 to 2.13: the function asks `has_torch_function` once, hands over, and goes on with its own code.
_COMPOSED: tuple[Callable[..., Any], ...] = (F.multi_head_attention_forward,)


def _never(_: Any) -> bool:
    return False


def _opened(function: Any) -> Callable[..., Any]:
    names = {**function.__globals__, "has_torch_function": _never}
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


OPENED = {function: _opened(function) for function in _COMPOSED}
"""By the function: its code, whose calls reach the mode that is on instead of itself."""
