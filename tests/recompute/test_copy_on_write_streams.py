"""Copies of shared memory on a GPU: by the stream and on the device that they belong to, and without waiting.

PyTorch's own allocator would copy with cudaMemcpy: on the default stream, beside the kernels of others, on whichever
device is current, and not at all in a CUDA graph.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfused
from tests.fake_cuda import gpus

# Of each scene: the calls of CUDA's runtime. `side` and `other` are streams of the second GPU, 0 its default one.
SCENES = """
    import gc, json, threading
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    import ckptfused
    from tests.fake_cuda.gpus import calls

    on_write = torch.ops.ckptfused.copy_on_write
    NAMES = ("copy", "copy and wait", "synchronize", "event")
    seen = {}

    def values():
        x = torch.empty(1000, device="cuda:1")
        x.copy_(torch.arange(1000.0))
        return x

    def same(x):
        return torch.equal(x.cpu(), torch.arange(1000.0))

    x, side, other = values(), torch.cuda.Stream(1), torch.cuda.Stream(1)
    seen["streams"] = [side.cuda_stream, other.cuda_stream]

    def scene(name, *more):
        seen[name] = [call[:3] for call in calls(*NAMES, *more)]
        assert torch.cuda.current_device() == 0

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            modes.append(str(function))
            return function(*args, **(kwargs or {}))
    modes = []

    torch.empty(1000, device="cuda:1")
    calls()
    with torch.cuda.stream(side):
        [copy], guard = on_write([x])
        copy.data_ptr()  # as Triton's launcher asks for it
    scene("first write")
    assert same(copy) and same(x) and torch._C._data_address(copy) != torch._C._data_address(x)
    calls()
    del guard
    scene("end after a write")

    [copy], guard = on_write([x])
    with torch.cuda.stream(side):
        copy.mul_(2)
    scene("write on another stream", "launch")
    del guard, copy
    scene("what it frees")

    with torch.cuda.stream(side):
        [copy], guard = on_write([x])
    held = [guard]
    del guard
    def end():
        with torch.cuda.stream(torch.cuda.Stream(0)):
            held.clear()
            assert torch.cuda.current_device() == 0
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    scene("end in another thread")
    assert same(copy)

    with torch.cuda.stream(other):
        [copy], guard = on_write([x])
        [inner], inner_guard = on_write([copy])
        del guard, copy
        calls()
        del inner_guard
    scene("end of a copy of a copy")
    assert same(inner)

    with torch.cuda.stream(side):
        [copy], guard = on_write([x[7:]])
        calls()
        with Mode():
            del guard
    scene("under a mode")
    assert modes == [], modes
    assert torch.equal(copy.cpu(), torch.arange(7.0, 1000.0))

    with torch.cuda.stream(side):
        [copy], guard = on_write([x])
        calls()
        copy.resize_(2000)
    scene("grown")
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(gpus.run(SCENES, tmp_path_factory.mktemp("cuda")).splitlines()[-1])


def expected(seen: dict[str, Any], *steps: tuple[str, str]) -> list[list[Any]]:
    """The calls on the second GPU."""
    streams = {"default": 0, **dict(zip(("side", "other"), seen["streams"], strict=True))}
    return [[name, 1, streams[stream]] for name, stream in steps]


@gpus.needs_cuda_build
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "steps"),
    [
        ("first write", [("copy", "side")]),
        ("end after a write", []),
        ("write on another stream", [("copy", "side"), ("launch", "side")]),
        ("what it frees", [("event", "default")]),  # the sharing stream may still read the copy
        ("end in another thread", [("copy", "side")]),
        ("end of a copy of a copy", [("copy", "other")]),
        ("under a mode", [("copy", "side")]),
        ("grown", [("copy", "side")]),
    ],
)
def test_a_copy_belongs_to_its_stream_and_device(
    seen: dict[str, Any], scene: str, steps: list[tuple[str, str]]
) -> None:
    assert seen[scene] == expected(seen, *steps)


# The same of what PyTorch's CPU build can run: two GPUs that it is told of, a kernel of Python's.
WITHOUT_CUDA = """
    import ctypes, json, threading
    import torch
    import ckptfused
    from tests.fake_cuda import gpus

    gpus.calls()
    fake, python = gpus._library(), ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = torch._C._data_address
    torch.cuda._lazy_init = lambda: None

    def on_second_gpu(x):
        capsule = torch.utils.dlpack.to_dlpack(x)
        data = python.PyCapsule_GetPointer(capsule, b"dltensor")
        device = ctypes.cast(data + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32))
        device[0], device[1] = 2, 1
        return torch._C._from_dlpack(capsule)

    def copy(to, source, non_blocking=False):
        assert non_blocking and to.device == source.device == torch.device("cuda:1")
        fake.fake_copy(*map(ctypes.c_void_p, map(address, (to, source))), ctypes.c_size_t(to.nbytes))
        return to

    kernel = torch.library.Library("aten", "IMPL")
    kernel.impl("copy_", copy, "CUDA")
    values = torch.arange(1000.0)
    x, seen = on_second_gpu(values), {}

    def scene(name):
        seen[name] = [call[:3] for call in gpus.calls("allocate", "copy", "copy and wait", "event")]
        assert fake.fake_current() == 0

    def same(t):
        return ctypes.string_at(address(t), 4000) == ctypes.string_at(address(values), 4000)

    fake.fake_stream(5)
    [lent], guard = torch.ops.ckptfused.copy_on_write([x])
    scene("no write")
    lent.data_ptr()
    scene("first write")
    assert same(lent) and address(lent) != address(x)
    del guard
    scene("end after a write")

    [lent], guard = torch.ops.ckptfused.copy_on_write([x])
    fake.fake_stream(6)
    lent.data_ptr()
    scene("write on another stream")
    fake.fake_stream(5)

    [lent], guard = torch.ops.ckptfused.copy_on_write([x])
    held = [guard]
    del guard
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    scene("end in another thread")
    assert same(lent) and address(lent) != address(x)
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen_without_cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(gpus.run_without_cuda(WITHOUT_CUDA, tmp_path_factory.mktemp("device")).splitlines()[-1])


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a PyTorch that is built without CUDA")
@pytest.mark.parametrize(
    ("scene", "steps"),
    [
        ("no write", []),
        ("first write", [("allocate", 5), ("copy", 5)]),
        ("end after a write", []),
        ("write on another stream", [("allocate", 6), ("event", 5), ("copy", 6)]),
        ("end in another thread", [("allocate", 5), ("copy", 5)]),
    ],
)
def test_a_copy_belongs_to_its_stream_and_device_without_cuda(
    seen_without_cuda: dict[str, Any], scene: str, steps: list[tuple[str, int]]
) -> None:
    assert seen_without_cuda[scene] == [[name, 1, stream] for name, stream in steps]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_extension_never_copies_by_itself() -> None:
    """Nor allocates: PyTorch does both, by stream and device."""
    library = Path(str(ckptfused._extension._C.__file__))
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    called = set(re.findall(r"\b(cuda[A-Z]\w*)", listed.stdout))
    if ckptfused.build_info()["cuda_architectures"]:
        assert "cudaGetLastError" in called
    assert not {name for name in called if re.match(r"cudaMemcpy|cudaMemset|cudaMalloc|cudaFree", name)}
