"""What the code of a function finds by name, and an object in its slots, with what a forward found there."""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

from ckptfused.state.reach import names_of, slots_of

_ABSENT: Any = object()
# Modules of Python's and our own may keep in globals what all threads share.
_LIBRARIES = frozenset({"ckptfused", *sys.stdlib_module_names})


class Bindings:
    """The cells, defaults and globals of a function."""

    __slots__ = ("_cells", "_function", "_names", "found")

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._cells = function.__closure__ or ()
        library = (function.__module__ or "").partition(".")[0] in _LIBRARIES
        self._names = () if library else names_of(function.__code__)
        self.found = self._now()

    def _now(self) -> list[Any]:
        function = self._function
        named = [function.__globals__.get(name, _ABSENT) for name in self._names]
        return [function.__defaults__, function.__kwdefaults__, *named, *map(_content, self._cells)]

    def put(self, content: list[Any]) -> list[Any]:
        """Has the names stand for that, and returns what they stood for; touches nothing where these are the same."""
        before = self._now()
        if all(map(operator.is_, before, content)):
            return before
        function, first = self._function, 2 + len(self._names)
        function.__defaults__, function.__kwdefaults__ = content[:2]
        for name, old, new in zip(self._names, before[2:first], content[2:first], strict=True):
            if old is not new:
                _put(function.__globals__, name, new)
        for cell, old, new in zip(self._cells, before[first:], content[first:], strict=True):
            if new is _ABSENT and old is not _ABSENT:
                del cell.cell_contents
            elif old is not new:
                cell.cell_contents = new
        return before


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _ABSENT


def _put(named: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        del named[name]
    else:
        named[name] = value


class SlotAttributes:
    """The attributes of an object that are in none of its dicts."""

    __slots__ = ("_held", "found")

    def __init__(self, held: Any) -> None:
        self._held = held
        self.found = self._now()

    def _now(self) -> dict[str, Any]:
        kind: Any = type(self._held)
        return {name: getattr(self._held, name, _ABSENT) for name in slots_of(kind)}

    def put(self, content: dict[str, Any]) -> dict[str, Any]:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        before = self._now()
        for name, value in content.items():
            if before[name] is not value:
                if value is _ABSENT:
                    object.__delattr__(self._held, name)
                else:
                    object.__setattr__(self._held, name, value)
        return before
