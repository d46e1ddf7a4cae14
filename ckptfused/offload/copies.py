"""Copies between a GPU and the host, on a stream of their own: all that offloading asks of a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ckptfused.cost.open_ledger import host_memory

LAST_PIECE = 16 << 20
"""Bytes: at most this much of a tensor is in a buffer of host memory that may be larger than its part of the tensor."""

PAGEABLE = (
    "ckptfused: host memory could not be pinned ({}), so inputs of layers are offloaded to ordinary memory: the copies "
    "are slower, and forward waits for them. Give the process more memory that it may lock, or let it offload less"
)


class Copies(Protocol):
    """What `Saved` needs of a device. No method makes the host wait.

    A "home" is the stream of a layer's own operations, to which its tensors belong: memory that they leave may be taken
    by whatever is given to that stream next. A "point" is a place in the order of a stream's operations.
    """

    def home(self) -> Any:
        """The stream that operations are given to now."""

    def point(self, home: Any) -> Any:
        """The place behind all that was given to a stream so far."""

    def to_host(self, x: Tensor, made: Any) -> tuple[Any, Any]:
        """A tensor laid out as x on the host, or what stands for it, copied once `made` is passed, and the point from
        which on it is there."""

    def to_device(self, host: Any, home: Any) -> tuple[Tensor, Any]:
        """The same in the other direction; the tensor belongs to `home`."""

    def wait(self, point: Any, home: Any, t: Tensor) -> None:
        """Has `home`, and the stream that operations are given to now, wait for a point before they go on with t."""

    def abandon(self, t: Tensor) -> None:
        """Has nobody take t's memory, once it is free, before the copies that have begun are done."""


def pieces(count: int) -> list[int]:
    """The sizes of the buffers of host memory in which so many bytes are.

    PyTorch's allocator of pinned memory takes the next power of two for each, so all but the last are one, each at most
    half as large as the one before.
    """
    sizes = []
    while count > LAST_PIECE:
        sizes.append(1 << (count.bit_length() - 1))
        count -= sizes[-1]
    return [*sizes, count] if count else sizes


def pinned_bytes(count: int) -> int:
    """What PyTorch's allocator of pinned memory takes for so many bytes, in `pieces`."""
    return sum(1 << (size - 1).bit_length() for size in pieces(count))


class HostTensor:
    """A tensor's values in host memory, in `pieces`, and how they lie: without gaps, in any order of its dimensions."""

    def __init__(self, x: Tensor, buffer: Callable[[Tensor], Tensor]) -> None:
        """buffer: makes host memory for a part of x, which is flat."""
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        self._buffers = [buffer(part) for part in self._parts(x)]

    def fill(self, x: Tensor) -> None:
        """Begins to copy x, laid out as the tensor that this one was made of, into it."""
        for host, part in zip(self._buffers, self._parts(x), strict=True):
            host.copy_(part, non_blocking=True)

    def empty_on(self, device: torch.device) -> Tensor:
        """A tensor without values on a device, laid out alike."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def write(self, x: Tensor) -> None:
        """Begins to copy the values into x, which lies alike."""
        for host, part in zip(self._buffers, self._parts(x), strict=True):
            part.copy_(host, non_blocking=True)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = x.as_strided((x.numel(),), (1,))
        return flat.split_with_sizes([size // x.element_size() for size in pieces(x.nbytes)])


class CudaCopies:
    """The copies of one GPU. Both directions share a stream: a host buffer is read after what was written to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._warned = False

    def home(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def point(self, home: torch.cuda.Stream) -> torch.cuda.Event:
        return home.record_event()

    def to_host(self, x: Tensor, made: torch.cuda.Event) -> tuple[HostTensor, torch.cuda.Event]:
        host = HostTensor(x, self._buffer)
        self._side.wait_event(made)
        with torch.cuda.stream(self._side):
            # PyTorch's allocator of pinned memory notes the stream: it gives a buffer to nobody while it is in use.
            host.fill(x)
        return host, self._side.record_event()

    def to_device(self, host: HostTensor, home: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(home):
            x = host.empty_on(self._device)
        self._side.wait_event(home.record_event())  # whoever had this memory before is done with it then
        with torch.cuda.stream(self._side):
            host.write(x)
        return x, self._side.record_event()

    def wait(self, point: torch.cuda.Event, home: torch.cuda.Stream, t: Tensor) -> None:
        home.wait_event(point)
        if (current := self.home()) != home:
            current.wait_event(point)
            t.record_stream(current)

    def abandon(self, t: Tensor) -> None:
        t.record_stream(self._side)

    def _buffer(self, part: Tensor) -> Tensor:
        """Pinned memory from PyTorch's own allocator, which reuses it; ordinary memory where there is none."""
        try:
            return torch.empty_like(part, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(PAGEABLE.format(str(error).partition("\n")[0]), stacklevel=2)
        return torch.empty_like(part, device="cpu")


class Layout:
    """What stands for a tensor on the host where memory is only counted, by the ledger that is open as it is made."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        self._host, self._bytes = host_memory(), pinned_bytes(x.nbytes)
        if self._host is not None:
            self._host.take(self._bytes)

    def __del__(self) -> None:
        if self._host is not None:
            self._host.take(-self._bytes)


class CountedCopies:
    """Copies of meta tensors that stand for a GPU's: what is on the host takes none of the memory that is counted."""

    def home(self) -> None:
        return None

    def point(self, home: None) -> None:
        return None

    def to_host(self, x: Tensor, made: None) -> tuple[Layout, None]:
        return Layout(x), None

    def to_device(self, host: Layout, home: None) -> tuple[Tensor, None]:
        return torch.empty_strided(host.shape, host.stride, dtype=host.dtype, device="meta"), None

    def wait(self, point: None, home: None, t: Tensor) -> None:
        pass

    def abandon(self, t: Tensor) -> None:
        pass


def copies_of(device: torch.device, kind: str) -> Copies | None:
    """The copies between a device and the host; None of what is on the host already, and of other devices than GPUs.

    kind: the device's, or that of the one that it stands for.
    """
    if kind != "cuda":
        return None
    return CudaCopies(device) if device.type == kind else CountedCopies()
