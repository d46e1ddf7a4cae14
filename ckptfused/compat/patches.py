"""Attributes of modules, classes and objects that are replaced for a while: the one place where that is done.

Threads may overlap in any order. A place keeps its original and the stand-ins that are in force; whenever one comes or
goes, the chain is built anew from the original, which is there again when the last one has gone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

LOCK = threading.RLock()
"""Held while something of another library is changed; never while somebody else's code runs."""

Make = Callable[[Any], Any]
"""Makes what stands in a place, from what stood there."""
_ABSENT = object()


class _Place:
    """An attribute with stand-ins. It holds its owner, whose identity therefore stays its own."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._own = self._shown = vars(owner).get(name, _ABSENT)
        self._found = getattr(owner, name)
        self.makes: list[Make] = []

    def renew(self) -> None:
        """Has the stand-ins stand there, each around the one before, or the original where there are none."""
        now = vars(self._owner).get(self._name, _ABSENT)
        if now is not self._shown:  # somebody else replaced it meanwhile, and is the one to take that back
            self._own, self._found = now, getattr(self._owner, self._name)
        value = self._found if self.makes else self._own
        for make in self.makes:
            value = make(value)
        if value is _ABSENT:
            delattr(self._owner, self._name)
        elif value is not now:
            setattr(self._owner, self._name, value)
        self._shown = value


_places: dict[tuple[int, str], _Place] = {}


@contextlib.contextmanager
def patched_attribute(owner: Any, name: str, make: Make) -> Iterator[None]:
    """A context in which `owner.name` is what `make` makes of the value that is there, for all threads.

    A stand-in sees every thread's calls, and passes those on that are not for it; `here` makes one that does.
    """
    key = (id(owner), name)
    own: Make = lambda plain: make(plain)  # noqa: E731 - told from other uses of the same function
    with LOCK:
        place = _places.get(key) or _places.setdefault(key, _Place(owner, name))
        place.makes.append(own)
        place.renew()
    try:
        yield
    finally:
        with LOCK:
            place.makes.remove(own)
            place.renew()
            if not place.makes:
                del _places[key]


def here(make: Make) -> Make:
    """For `patched_attribute`: a stand-in for this thread; calls of other threads go to the original."""
    mine = threading.get_ident()

    def both(plain: Any) -> Any:
        stand_in = make(plain)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (stand_in if threading.get_ident() == mine else plain)(*args, **kwargs)

        return call

    return both


def instead(stand_in: Callable[..., Any]) -> Make:
    """`here`, for a stand-in that needs no original."""
    return here(lambda plain: stand_in)
