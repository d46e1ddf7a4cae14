"""Two kinds of CPU memory as a device and its host, with copies that take their time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ckptfused.offload import calls

HOME, PASSED = "home", "passed"


class Memory:
    """The memory of a tensor, which lives as long as others hold it."""

    def __init__(self, t: Tensor) -> None:
        self._storage = StorageWeakRef(t.untyped_storage())
        self._layout = t.dtype, t.storage_offset(), t.shape, t.stride()

    def is_free(self) -> bool:
        return self._storage.expired()

    def tensor(self) -> Tensor | None:
        """The tensor, if its memory is still there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, *layout = self._layout
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *layout)


def _alone(method: Any) -> Any:
    """Has one thread at a time in a method of the fake."""

    @functools.wraps(method)
    def locked(self: FakeCopies, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return locked


class FakeCopies:
    """A stand-in for `ckptfused.offload.copies.CudaCopies`.

    What the home is given runs at once, as on a CPU. Copies run in order; `late`: not before somebody waits for them,
    which is as late as a stream may be; else at once, which is as early. Until then, what they fill is NaN. What a copy
    reads or fills on the device has to be there when it runs, unless it was abandoned. `faults` says what was not.
    """

    def __init__(self, late: bool = True) -> None:
        self.late = late
        self.log: list[tuple[str, int]] = []
        """Copies and waits in order, with the number of the input."""
        self.faults: list[str] = []
        self.hosts: list[Memory] = []
        """The host's buffers, by the number of the input."""
        self.most = 0
        """How many inputs that had left were on the device at a time."""
        self._on_device: list[Memory] = []
        self._queue: list[Callable[[], None]] = []
        self._done = self._begun = 0
        self._kept: list[Tensor] = []
        self._lock = threading.RLock()

    def home(self) -> str:
        return HOME

    def point(self, home: str) -> str:
        assert home == HOME
        self.count()
        return PASSED

    @_alone
    def to_host(self, x: Tensor, made: Any) -> tuple[Tensor, int]:
        assert made == PASSED and not x.requires_grad
        host = _unfilled(x)
        self.log.append(("out", len(self.hosts)))
        self.hosts.append(Memory(host))
        self._on_device.append(Memory(x))
        return host, self._begin(Memory(x), lambda device: host.copy_(device))

    @_alone
    def to_device(self, host: Tensor, home: str) -> tuple[Tensor, int]:
        assert home == HOME
        x = _unfilled(host)
        self.log.append(("in", self._number(host)))
        self._on_device.append(Memory(x))
        return x, self._begin(Memory(x), lambda device: device.copy_(host))

    @_alone
    def wait(self, point: int, home: str, t: Tensor) -> None:
        assert home == HOME
        while self._done < point:
            self._run_next()

    @_alone
    def abandon(self, t: Tensor) -> None:
        if self._queue:
            self._kept.append(t)

    @_alone
    def count(self) -> int:
        """How many inputs that had left are on the device."""
        self._on_device = [memory for memory in self._on_device if not memory.is_free()]
        present = len({memory._storage for memory in self._on_device})
        self.most = max(self.most, present)
        return present

    def check(self) -> None:
        """Finishes what was begun. **Raises** what went wrong."""
        while self._queue:
            self._run_next()
        self._kept.clear()
        assert not self.faults

    def moved(self, direction: str) -> list[int]:
        """The numbers of the inputs that went "out" or "in"."""
        return [number for what, number in self.log if what == direction]

    def held(self) -> int:
        """How many of the host's buffers are held."""
        return sum(not host.is_free() for host in self.hosts)

    def _begin(self, device: Memory, fill: Callable[[Tensor], Tensor]) -> int:
        def run() -> None:
            t = device.tensor()
            if t is None:
                self.faults.append(f"copy {self._done}: its device memory was free before it ran")
            else:
                fill(t)

        self._queue.append(run)
        self._begun += 1
        self.count()
        if not self.late:
            self._run_next()
        return self._begun

    def _run_next(self) -> None:
        with torch.no_grad():
            self._queue.pop(0)()
        self._done += 1

    def _number(self, host: Tensor) -> int:
        places = [i for i, memory in enumerate(self.hosts) if memory._storage.cdata == host.untyped_storage()._cdata]
        return places[-1]


def _unfilled(t: Tensor) -> Tensor:
    return torch.full_like(t, torch.nan)


@contextlib.contextmanager
def faked(late: bool = True) -> Iterator[FakeCopies]:
    """A context in which the CPU is a device whose tensors are offloaded. Ends with `check`."""
    copies = FakeCopies(late)
    with mock.patch.object(calls, "copies_of", return_value=copies):
        yield copies
    copies.check()
