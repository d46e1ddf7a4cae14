"""Other tensors in the place of a module's parameters and buffers, for one thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn

_lock = threading.RLock()
_inside: dict[int, int] = {}
"""How many calls of each thread are under way."""
_places: dict[tuple[nn.Module, str], _Place] = {}


class entered:  # noqa: N801  (a context manager that is used like a function)
    """Around a checkpointed call and each replay: tells threads that may meet in a module's buffers from one alone."""

    __slots__ = ("_thread",)

    def __enter__(self) -> None:
        self._thread = here = 0 if torch.compiler.is_compiling() else get_ident()
        if not here:
            return
        # No other thread writes at this key. Whoever makes a place looks at the keys after that.
        _inside[here] = _inside.get(here, 0) + 1
        if _places:
            with _lock:
                for place in _places.values():
                    place.install()

    def __exit__(self, *exception: object) -> None:
        if here := self._thread:
            count = _inside[here]
            if count > 1:
                _inside[here] = count - 1
            else:
                del _inside[here]


class shown:  # noqa: N801  (likewise)
    """A context in which this thread finds these tensors, by name, in a module's `_buffers` or `_parameters`.

    What it assigns there is gone afterwards. Other threads within `entered` find, and change, the module's own.
    """

    __slots__ = ("_before", "_tensors", "_thread")

    def __init__(self, tensors: Mapping[tuple[nn.Module, str], Mapping[str, Any]]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        self._thread = here = get_ident()
        self._before: list[dict[str, Any] | None] = []
        with _lock:
            for (module, name), tensors in self._tensors.items():
                place = _places.setdefault((module, name), _Place(vars(module), name))
                before = place.views.get(here)
                self._before.append(before)
                place.views[here] = {**(place.own if before is None else before), **tensors}
                place.install()

    def __exit__(self, *exception: object) -> None:
        here = self._thread
        with _lock:
            for key, before in zip(self._tensors, self._before, strict=True):
                place = _places[key]
                if before is None:
                    del place.views[here]
                else:
                    place.views[here] = before
                if not place.views:
                    del _places[key]
                place.install()


class _Place:
    """A module's dict of parameters or buffers, while threads have views of it."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        self.attributes = attributes
        self.name = name
        self.own: dict[str, Any] = attributes[name]
        self.views: dict[int, dict[str, Any]] = {}

    def install(self) -> None:
        """Puts in place what all threads can read."""
        if not self.views:
            self.attributes[self.name] = self.own
        elif len(self.views) == 1 and self.views.keys() >= _inside.keys():
            # A plain dict: torch.compile, of what is called within, knows no other.
            (self.attributes[self.name],) = self.views.values()
        elif type(self.attributes[self.name]) is not _Separate:
            self.attributes[self.name] = _Separate(self)


class _Separate(dict):  # type: ignore[type-arg]
    """Gives each thread its view; one without reads and writes the module's own."""

    def __init__(self, place: _Place) -> None:
        super().__init__(place.own)  # for C code, which reads a dict past its methods
        self.place = place

    def here(self) -> dict[str, Any]:
        """What the current thread sees."""
        return self.place.views.get(get_ident(), self.place.own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.here()),)


def _method(name: str) -> Any:
    def method(self: _Separate, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.here(), name)(*args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__repr__"),
    *("__reversed__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault"),
    *("update", "values"),
):
    setattr(_Separate, _name, _method(_name))
