"""Checks of Python values: each raises one error naming the argument, what was expected and what came."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Hashable, Iterable


def check_choice(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the allowed words."""
    if not isinstance(value, str):
        raise TypeError(f"{where}: expected one of {', '.join(allowed)}, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{where}: expected one of {', '.join(allowed)}, got {value!r}")


def nearest(given: str, names: Iterable[str], least: float = 0.6) -> str:
    """The end of an error about a name: which of those that there are was probably meant; "" where none is near, that
    is where less of the two than `least` is the same."""
    known = {name.lower(): name for name in names}
    found = difflib.get_close_matches(given.lower(), known, 1, least)
    return f"; did you mean {known[found[0]]}?" if found else ""


def check_bool(where: str, value: object) -> bool:
    """The value; raise unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: expected a bool, got {value!r}")
    return value


def check_flag(where: str, value: object) -> bool:
    """The value as a bool; raise unless it is one, or 0 or 1."""
    if isinstance(value, str) or not isinstance(value, Hashable) or value not in (False, True):
        raise TypeError(f"{where}: expected a bool, got {value!r}")
    return bool(value)


def check_integer(where: str, value: object, least: int) -> int:
    """The value as an int; raise unless it is an integer, NumPy's included, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where}: expected an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{where}: expected an integer of at least {least}, got {value}")
    return int(value)


def check_number(where: str, value: object) -> float:
    """The value as a float; raise unless it is a finite number, NumPy's included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value!r}")
    return float(value)


def check_at_least(where: str, value: object, least: float) -> float:
    """The value as a float; raise unless it is a finite number of at least `least`."""
    number = check_number(where, value)
    if number < least:
        raise ValueError(f"{where}: expected a number of at least {least:g}, got {value!r}")
    return number


def check_probability(where: str, value: object) -> float:
    """The value as a float; raise unless it is a number in [0, 1], as a dropout probability is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: expected a number in [0, 1], got {value!r}")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{where}: expected a number in [0, 1], got {value!r}")
    return float(value)
