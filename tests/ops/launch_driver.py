"""What stands for the CUDA driver where there is none: it notes what it is asked to launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip


class Launched(NamedTuple):
    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int | None
    parameters: tuple[bytes, ...]


class FakeDriver:
    """cuLaunchKernel at an address. sizes: bytes of each parameter, by function."""

    def __init__(self, sizes: Mapping[int, Sequence[int]], error: int = 0) -> None:
        self.sizes = sizes
        self.error = error
        self.launched: list[Launched] = []
        self._launch = _LAUNCH(self._note)  # has to outlive its address
        self.address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0

    def _note(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int | None,
        params: Any, extra: int | None,
    ) -> int:  # fmt: skip
        parameters = tuple(ctypes.string_at(params[i], size) for i, size in enumerate(self.sizes[function]))
        self.launched.append(Launched(function, (gx, gy, gz), (bx, by, bz), shared, stream, parameters))
        return self.error or bool(extra)
