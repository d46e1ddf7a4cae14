"""A process whose libcuda.so.1 is fake_cuda.c, in which Triton compiles and launches for an H100 that is not there.

Triton's kernels, its binder and its launcher are real; so are records.py and the C++ that repeats the launches. Both
roads end in one fake driver, which notes what comes and knows each kernel's parameters from its cubin.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver as triton_driver

from ckptfused._extension import _C
from ckptfused.triton import attention, launch
from ckptfused.triton.configs import Config
from tests.ops.launch_driver import FakeDriver
from tests.triton.compiling import KERNELS, parameters

_PARAMETER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
INVALID = 1


class Gpu(FakeDriver):
    """An H100 that runs nothing: Triton's driver, and CUDA's below it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__({})
        self.tables: dict[int, list[tuple[int, int]]] = {}
        self.asked = 0  # for a parameter
        self.change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = list  # of what it answers
        self._parameter = _PARAMETER(self._info)
        for name, function in (("fake_launch", self._launch), ("fake_parameter", self._parameter)):
            address = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.in_dll(library, name).value = address
        self._functions = itertools.count(0x1000)
        self.launcher_cls = nvidia.CudaLauncher
        shared = {"max_shared_mem": 227 << 10}
        self.utils = SimpleNamespace(load_binary=self.load, get_device_properties=lambda device: shared)

    def load(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        function = next(self._functions)
        table = parameters(cubin)
        self.tables[function] = self.change(table)
        self.sizes = {**self.sizes, function: [size for _, size in table]}
        return 1, function, 0, 0, 1024

    def _info(self, function: int, index: int, offset: Any, size: Any) -> int:
        self.asked += 1
        table = self.tables[function]
        if index >= len(table):
            return INVALID
        offset[0], size[0] = table[index]
        return 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The fake libcuda.so.1, which whoever opens that name from now on gets."""
    folder = tmp_path_factory.mktemp("cuda")
    target = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{nvidia.include_dirs[0]}", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    triton.knobs.nvidia.libcuda_path = str(folder)
    triton.knobs.cache.dir = str(folder / "cache")
    ctypes.CDLL(str(target), ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL("libcuda.so.1")
    if not hasattr(found, "fake_launch"):
        pytest.skip("CUDA's own driver is loaded already")
    return found


@pytest.fixture
def gpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The fake GPU, whose tensors are the CPU's; tiles are small, to be compiled quickly."""
    found = Gpu(library)
    monkeypatch.setattr(triton_driver, "_active", found)
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(launch, "INTERPRETED", Config(16, 16, 2, 1))
    number = launch._number
    monkeypatch.setattr(
        launch, "_number", lambda name, value, a, calls: number(name, value, a, calls) if exact(a) else value
    )
    as_on_gpu = _C.testing.AttentionAsOnGpu()
    ops = torch.library.Library("ckptfused", "IMPL")
    ops.impl("attention_triton_fwd", attention.attention_fwd, "CPU")
    ops.impl("attention_triton_bwd", attention.attention_bwd, "CPU")
    _C.testing.use_launch_records(True)
    yield found
    _C.testing.use_launch_records(False)
    ops._destroy()
    del as_on_gpu


def exact(a: Any) -> bool:
    return bool(a.q.dtype == torch.float64)
