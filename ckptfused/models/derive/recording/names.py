"""What calls are called, and in which line of a layer's code they are."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

_NOT_THE_LAYERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), threading.__file__)


def words_of(*lines: str) -> frozenset[str]:
    """The words of some lines."""
    return frozenset(" ".join(lines).split())


def function_name(func: Any) -> str:
    """`"add"` of `Tensor.__add__`, `"T"` of a property's getter."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return name.strip("_") if name.startswith("__") else name


def code_place() -> str:
    """File and line of the layer's code that runs now."""
    frame: Any = (inner := sys._getframe(2))
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_LAYERS):
        frame = frame.f_back
    frame = inner if frame is None else frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
