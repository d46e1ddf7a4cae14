"""Checks of Python values: each raises one error naming the argument, what was expected and what came."""

from __future__ import annotations

import math
import sys
from typing import Any


def check_choice(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if not isinstance(value, str):
        raise TypeError(f"{where}: expected one of {', '.join(allowed)}, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{where}: expected one of {', '.join(allowed)}, got {value!r}")


def check_integer(where: str, value: object, least: int) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}: expected an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{where}: expected an integer of at least {least}, got {value}")


def check_number(where: str, value: object) -> None:
    """Raise unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value!r}")


def check_probability(where: str, value: object) -> None:
    """Raise unless `value` is a dropout probability, a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: expected a dropout probability in [0, 1], got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{where}: expected a dropout probability in [0, 1], got {value!r}")


def is_dtensor(value: object) -> bool:
    """Whether a tensor is distributed."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import, and without it there is none
    return module is not None and isinstance(value, module.DTensor)
