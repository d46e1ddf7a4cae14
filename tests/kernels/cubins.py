"""The CUDA kernels compiled as setup.py does, once a run for all tests that look at what came out."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

import setup_cuda
from tests.tools import nvcc

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "csrc/kernels/cuda").glob("*.cu"))
NVCC = nvcc()


def gencode_of(architectures: str) -> list[str]:
    """nvcc's flags for architectures as TORCH_CUDA_ARCH_LIST says them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        return setup_cuda.architecture_flags()


def processors(gencode: Sequence[str]) -> set[str]:
    """The processors that ptxas compiles for."""
    return {name for name in setup_cuda.architecture_names(list(gencode)) if name.startswith("sm_")}


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture; stack is local memory, bytes a thread."""

    kernel: str
    architecture: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def local(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class Compiled:
    """One .cu file: what ptxas said of its kernels, and a cubin an architecture."""

    usages: list[Usage]
    cubins: list[Path]


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?\b(\d+) bytes smem)?")


def parse(report: str) -> list[Usage]:
    """The kernels in what `nvcc -Xptxas -v` prints.

    A kernel's own lines follow "Compiling entry function"; those of functions that it calls name them first, and their
    stack counts with it.
    """
    found = []
    entry: tuple[str, str] | None = None
    stack = [0, 0, 0]
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entry, stack = (match[1], match[2]), [0, 0, 0]
        elif match := _STACK.search(line):
            stack = [most + int(more) for most, more in zip(stack, match.groups(), strict=True)]
        elif (match := _USED.search(line)) and entry is not None:
            found.append(Usage(*entry, int(match[1]), *stack, int(match[2] or 0)))
            entry = None
    return found


def compile_kernels(source: Path, folder: Path, gencode: Sequence[str]) -> Compiled:
    """One .cu file, compiled as setup.py does."""
    assert NVCC is not None
    # -std as torch 2.11 has it
    flags = [*setup_cuda.NVCC_FLAGS, "-std=c++17", "-Xptxas", "-v", "-I", str(ROOT / "csrc")]
    output = ["-fatbin", "--keep", "--keep-dir", str(folder), "-o", str(folder / "x.fatbin")]
    command = [str(NVCC), *flags, *gencode, *output, str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return Compiled(parse(run.stdout + run.stderr), sorted(folder.glob("*.cubin")))


def compile_once(source: Path, temporary: pytest.TempPathFactory, gencode: Sequence[str]) -> Compiled:
    """Likewise, by whichever worker of a run needs it first."""
    base = temporary.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "-".join(["cubins", source.stem, *sorted(processors(gencode))])
    folder.mkdir(exist_ok=True)
    report = folder / "report"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            compiled = compile_kernels(source, folder, gencode)
            report.write_text(json.dumps([astuple(usage) for usage in compiled.usages]))
            return compiled
    usages = [Usage(*fields) for fields in json.loads(report.read_text())]
    return Compiled(usages, sorted(folder.glob("*.cubin")))


def demangled(names: Sequence[str]) -> list[str]:
    """Names for a person, where a demangler is at hand: without namespaces, casts of enumerators and arguments."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return list(names)
    run = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = [re.sub(r"ckptfused::|\(anonymous namespace\)::|^void ", "", name) for name in run.stdout.splitlines()]
    return [re.sub(r"\(.*", "", re.sub(r"\(\w+\)(?=\d)", "", name)) for name in plain]
