"""Autocast around the forward pass of a step that is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

AUTOCAST_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Autocast = torch.dtype | str | None
"""How it is asked for: a type, its name, or None."""


def autocast_type(autocast: Autocast, kind: str) -> torch.dtype | None:
    """The type in which forward computes on a device of this kind: the one asked for, or that of an autocast that is on
    around the call. **Raises** `ValueError` for another than bfloat16 and float16."""
    if autocast is None:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    found = AUTOCAST_TYPES.get(autocast) if isinstance(autocast, str) else autocast
    if found not in AUTOCAST_TYPES.values():
        raise ValueError(f"autocast: expected torch.bfloat16, torch.float16, their names or None, got {autocast!r}")
    return found


@contextlib.contextmanager
def outside(kind: str) -> Iterator[None]:
    """A context in which no autocast is on for a device of this kind, and no region is open, with casts of weights to
    keep.
    """
    depth = torch.autocast_increment_nesting() - 1
    enabled = torch.is_autocast_enabled(kind)
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def region(kind: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Autocast for the forward pass alone, as PyTorch recommends it; None: only what the model itself turns on."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(kind, dtype)


def autocast_name(dtype: torch.dtype | None) -> str:
    """One of `AUTOCAST_TYPES`; "" of None."""
    return "" if dtype is None else next(name for name, found in AUTOCAST_TYPES.items() if found == dtype)
