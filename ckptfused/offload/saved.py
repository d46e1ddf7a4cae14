"""What autograd holds in the place of an input that goes to the host."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ckptfused._extension import _C
from ckptfused.offload.copies import Copies
from ckptfused.recompute.held import check_unchanged, described


class OffloadedInput:
    """An input of a layer that goes to the host and comes back.

    On the device, on the host, or on both: while a copy is under way, and before the device memory is given up. It dies
    with the graph, and what it holds with it.
    """

    def __init__(
        self, copies: Copies, x: Tensor, home: Any, made: Any, before: weakref.ref[OffloadedInput] | None
    ) -> None:
        self._copies = copies
        self._home = home
        self._made = made  # the point from which on x has its values
        self._name = described(x)
        self._counters = _C.VersionCounters([x])
        self._versions = self._counters.now()
        self._here: Tensor | None = x.detach()
        self._host: Any = None
        self._done: Any = None  # where a copy under way ends, if its home does not wait for that yet
        self._before = before

    @property
    def before(self) -> OffloadedInput | None:
        """What was saved before it, and so is asked for after it; None if that is gone."""
        return None if self._before is None else self._before()

    def leave(self) -> None:
        """Begins the copy to the host. Once for each: the graph may be gone through twice."""
        if self._host is None and self._here is not None:
            self._host, self._done = self._copies.to_host(self._here, self._made)

    def release(self) -> None:
        """Gives up the device memory where the host has the values; what comes after waits for the copy."""
        if self._host is not None and self._here is not None:
            self._settle(self._here)
            self._here = None

    def fetch(self) -> None:
        """Begins the copy to the device, unless the values are there."""
        if self._host is not None and self._here is None:
            self._here, self._done = self._copies.to_device(self._host, self._home)

    def drop(self) -> None:
        """Gives up the device memory where the host has the values; nothing waits."""
        if self._host is not None and self._here is not None:
            if self._done is not None:
                self._copies.abandon(self._here)
            self._here = self._done = None

    def take(self) -> Tensor:
        """The values on the device. **Raises** `RuntimeError` if the input was changed in place since it was saved."""
        check_unchanged(self._name, *self._counters.now(), *self._versions)
        self.fetch()
        x = self._here
        assert x is not None
        self._settle(x)
        if self._host is not None:
            self._here = None  # whoever asked for it holds it now
        return x

    def _settle(self, x: Tensor) -> None:
        if self._done is not None:
            self._copies.wait(self._done, self._home, x)
            self._done = None

    def __del__(self) -> None:
        self.drop()
