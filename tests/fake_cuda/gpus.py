"""Programs on two GPUs that are not there: PyTorch's CUDA build is real, the runtime below it is runtime.c.

Tensors have the host's memory and kernels do nothing. What a test sees is which calls reach CUDA's runtime, on which
device and stream.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import setup_cuda
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "FAKE_CUDA_LIBRARY"

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch that is built with CUDA")


class Call(NamedTuple):
    """A call of CUDA's runtime."""

    name: str  # allocate, copy, "copy and wait", event, launch, synchronize
    device: int
    stream: int
    bytes: int


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ[LIBRARY])


def calls(*names: str) -> list[Call]:
    """What was called since this was called last; of these names, if any are given."""
    take = _library().fake_notes
    take.restype = ctypes.c_char_p
    found = [Call(*fields[:1], *map(int, fields[1:])) for fields in map(_fields, take().decode().splitlines())]
    return [call for call in found if not names or call.name in names]


def _fields(line: str) -> list[str]:
    return line.rsplit(" ", 3)


def run(code: str, folder: Path) -> str:
    """What code prints in a process with those GPUs."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        headers = Path(torch.__file__).resolve().parents[1].glob("nvidia/*/include")
        toolkit = setup_cuda.find_toolkit()
        includes = [*headers, *([toolkit / "include"] if toolkit is not None else [])]
        flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *(f"-I{path}" for path in includes)]
        source = Path(__file__).with_name("runtime.c")
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    environment = os.environ | {LIBRARY: str(library), "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return _said(
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    )


def run_without_cuda(code: str, folder: Path) -> str:
    """What code prints in a process where device.cpp stands for the GPUs, as PyTorch's CPU build knows none.

    The code loads it, by `calls()`, before it looks at a device.
    """
    library = folder / "libdevice.so"
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    source = Path(__file__).with_name("device.cpp")
    subprocess.run(["c++", str(source), *flags, "-o", str(library)], check=True)
    return _said(forks.python(code, **{LIBRARY: str(library)}))


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
