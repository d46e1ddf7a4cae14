"""An argument by which layers hand something on (Gemma 4's keys and values): most of them do not look into it."""

from __future__ import annotations

from typing import Any

from ckptfused.models.derive.recording.recorder import RefusedError


def untouched(value: Any) -> Any:
    """An object of a class like its own, for a layer that only hands it on, or asks whether it is one, or None. What
    else is done with it **raises** `RefusedError`: what a `UserDict` does it reads in an attribute.
    """
    kind = type(value)

    def refuse(self: Any, *args: Any) -> Any:
        raise RefusedError(f"an argument of type {kind.__name__} is looked into")

    def attribute(self: Any, name: str) -> Any:
        return kind if name == "__class__" else refuse(self)

    return object.__new__(type(kind.__name__, (kind,), {"__getattribute__": attribute, "__setattr__": refuse}))
