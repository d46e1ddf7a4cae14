"""What C++ needs to repeat a call's launches without Python (csrc/ops/launch_records.h).

A kernel whose launch is more than cuLaunchKernel's arguments, or whose parameters the driver counts otherwise than we
do, is not recorded: its calls go on through Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ckptfused._extension import _C

Launch = tuple[int, int, int, int, list[int], list[tuple[int, int]]]
# (place among a launcher's arguments, name, what gives a number's bytes; None: a pointer), of each that is passed.
Passed = list[tuple[int, str, Callable[[Any], int] | None]]


def _bits(kind: Any) -> Callable[[float], int]:
    return lambda value: int.from_bytes(bytes(kind(value)), "little")


# Parameters other than pointers, as Triton's signatures name them: their size, and their bytes as a number.
_NUMBERS: dict[str, tuple[int, Callable[[Any], int]]] = {
    "i32": (4, lambda value: value & 0xFFFFFFFF),
    "i64": (8, lambda value: value & 0xFFFFFFFFFFFFFFFF),
    "fp32": (4, _bits(ctypes.c_float)),
    "fp64": (8, _bits(ctypes.c_double)),
}
_POINTER = 8
# Each is a null pointer behind a kernel's own parameters, where the kernel needs no such memory.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
# Of a kernel that is started by its grid, threads and shared memory alone.
_PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, **dict.fromkeys(_SCRATCH, 0)}
# By id: what records point to lives as long as they may. Of a kernel, what is passed to it.
_kept: dict[int, tuple[object, Passed]] = {}


class Driver(NamedTuple):
    """The CUDA driver: the address of cuLaunchKernel, and cuFuncGetParamInfo."""

    launch: int
    parameter: Callable[..., int]


@cache
def driver() -> Driver | None:
    """The driver of this process; None where it is older than CUDA 12.4."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return Driver(ctypes.cast(library.cuLaunchKernel, ctypes.c_void_p).value or 0, library.cuFuncGetParamInfo)
    except (OSError, AttributeError):
        return None


def layout(signature: Mapping[str, str]) -> list[tuple[int, int]]:
    """(offset, bytes) of a kernel's parameters, in order, those of its scratch included."""
    sizes = [_size(kind) for kind in signature.values() if kind != "constexpr"] + [_POINTER] * len(_SCRATCH)
    found, end = [], 0
    for size in sizes:
        begin = -(-end // size) * size
        found.append((begin, size))
        end = begin + size
    return found


def _size(kind: str) -> int:
    return _POINTER if kind.startswith("*") else _NUMBERS[kind][0]


def _fits(parameter: Callable[..., int], function: int, expected: list[tuple[int, int]]) -> bool:
    """Whether a loaded kernel's parameters, as the driver has them, are these and no more."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    there = []
    for i in range(len(expected) + 1):
        status = parameter(ctypes.c_void_p(function), ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size))
        there.append(None if status else (offset.value, size.value))
    return there == [*expected, None]


def _passed(cuda: Driver, compiled: Any) -> Passed | None:
    """What is passed to a kernel; None where it is not one that C++ can start."""
    if (known := _kept.get(id(compiled))) is not None:
        return known[1]
    signature = compiled.src.signature
    plain = all(getattr(compiled.metadata, name) == value for name, value in _PLAIN.items())
    if not plain or not _fits(cuda.parameter, compiled.function, layout(signature)):
        return None
    kinds = [(i, name, kind) for i, (name, kind) in enumerate(signature.items()) if kind != "constexpr"]
    found: Passed = [(i, name, None if kind.startswith("*") else _NUMBERS[kind][1]) for i, name, kind in kinds]
    _kept[id(compiled)] = compiled, found
    return found


def _hooks() -> list[list[Any]] | None:
    """Triton's lists of launch hooks; None where there are hooks, or where these are no such lists."""
    runtime = triton.knobs.runtime
    lists = [getattr(hook, "calls", None) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)]
    return [each for each in lists if isinstance(each, list)] if all(each == [] for each in lists) else None


class Launches:
    """The tensors that a call makes and the kernels that it starts.

    inputs: by the kernels' names for them, in the order of the op's arguments; none: nobody wants a record.
    """

    def __init__(self, inputs: Mapping[str, Tensor | None] | None = None) -> None:
        self._wanted = inputs is not None and _C.launches_wanted()
        self._tensors = dict(inputs or {})
        self._made: list[tuple[Tensor, float | None]] = []
        self._started: list[tuple[Any, int, Sequence[Any]]] = []

    def make(self, name: str, t: Tensor, fill: float | None = None) -> Tensor:
        """t, which was made for this call, its results first. fill: what it is filled with."""
        if self._wanted:
            assert name not in self._tensors
            self._tensors[name] = t
            self._made.append((t, fill))
        return t

    def start(self, kernel: Any, grid: int, *args: Any, **constants: Any) -> None:
        """Starts a kernel of Triton's."""
        compiled = kernel[(grid,)](*args, **constants)
        if self._wanted:
            self._started.append((compiled, grid, args))

    def hand_over(self, results: int) -> None:
        """To be called once all is started. results: how many of those made are the op's."""
        cuda = driver() if self._wanted else None
        if cuda is None:
            return
        try:
            hooks, launches = _hooks(), [self._launch(cuda, *each) for each in self._started]
        except (AttributeError, LookupError):
            return  # a Triton that is not known
        if hooks is None or None in launches:
            return
        _kept.update((id(each), (each, [])) for each in hooks)
        _C.keep_launches(cuda.launch, hooks, self._made, results, [each for each in launches if each])

    def _launch(self, cuda: Driver, compiled: Any, grid: int, args: Sequence[Any]) -> Launch | None:
        passed = _passed(cuda, compiled)
        if passed is None:
            return None
        slots = {name: i for i, name in enumerate(self._tensors)}
        values = [0] * (len(passed) + len(_SCRATCH))
        tensors: list[tuple[int, int]] = []
        for parameter, (i, name, number) in enumerate(passed):
            if number is not None:
                values[parameter] = number(args[i])
                continue
            t = self._tensors[name]
            if t is None or t.data_ptr() != args[i].data_ptr():
                return None  # a copy, which only Python makes
            tensors.append((parameter, slots[name]))
        return compiled.function, grid, 32 * compiled.metadata.num_warps, compiled.metadata.shared, values, tensors
