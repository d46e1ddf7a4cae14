"""What ptxas makes of the CUDA kernels: no spills and no local memory, for every architecture that is built by default.

Local memory is where registers spill to and where arrays live whose indices are not known when compiling: both cost
what shared memory or a register would not. The table of all kernels is printed when pytest ends.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import setup_cuda
from tests.conftest import SUMMARY
from tests.tools import nvcc

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted((ROOT / "csrc/kernels/cuda").glob("*.cu"))
NVCC = nvcc()

pytestmark = pytest.mark.once
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


# Of the two that are built by default the older one takes its turn in `make test-all`: launch bounds and the limit of
# registers are the same for both, and an array with indices that are not known is in local memory on either.
ARCHITECTURES = [pytest.param("8.0", marks=pytest.mark.extended), "9.0+PTX"]


@pytest.fixture(params=ARCHITECTURES)
def gencode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """nvcc's flags for one architecture."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", request.param)
    return setup_cuda.architecture_flags()


def processors(gencode: list[str]) -> set[str]:
    """Those that ptxas compiles for."""
    return {name for name in setup_cuda.architecture_names(gencode) if name.startswith("sm_")}


def test_architectures_are_those_that_are_built() -> None:
    assert ";".join(getattr(each, "values", [each])[0] for each in ARCHITECTURES) == setup_cuda.ARCHITECTURES


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


def compile_kernels(source: Path, folder: Path, gencode: list[str]) -> list[Usage]:
    """The report of one .cu file, compiled as setup.py does."""
    assert NVCC is not None
    flags = [
        *setup_cuda.NVCC_FLAGS,
        "-std=c++17",
        "-Xptxas",
        "-v",
        "-I",
        str(ROOT / "csrc"),
    ]  # -std as torch 2.11 has it
    command = [str(NVCC), *flags, *gencode, "-fatbin", str(source)]
    run = subprocess.run([*command, "-o", str(folder / "x.fatbin")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return parse(run.stdout + run.stderr)


def demangled(usages: Sequence[Usage]) -> list[str]:
    """Names for a person, where a demangler is at hand."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    names = [usage.kernel for usage in usages]
    if tool is None or not names:
        return names
    run = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    # Without namespaces, the casts of enumerators and the argument list.
    noise = r"ckptfused::|\(anonymous namespace\)::|^void |\(\w+\)(?=\d)"
    return [re.sub(r"\(.*", "", re.sub(noise, "", name)) for name in run.stdout.splitlines()]


def table(usages: Sequence[Usage]) -> str:
    lines = [f"{'registers':>9} {'stack':>5} {'spills':>6} {'shared':>6}  kernel"]
    for usage, name in zip(usages, demangled(usages), strict=True):
        spills = usage.spill_stores + usage.spill_loads
        lines.append(f"{usage.registers:9} {usage.stack:5} {spills:6} {usage.shared:6}  {usage.architecture} {name}")
    return "\n".join(lines)


def local_memory(usages: Sequence[Usage]) -> list[str]:
    """A line for each kernel that uses local memory."""
    return table([usage for usage in usages if usage.local]).splitlines()[1:]


@needs_nvcc
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_registers_alone(
    source: Path, tmp_path: Path, gencode: list[str], record_property: Callable[[str, object], None]
) -> None:
    usages = compile_kernels(source, tmp_path, gencode)
    record_property(SUMMARY, table(usages))
    assert {usage.architecture for usage in usages} == processors(gencode) != set()
    assert not local_memory(usages)


PLANTED = """
__global__ void plain(float* x) { x[threadIdx.x] *= 2; }
__global__ void indexed(float* x, const int* at) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i * 32 + threadIdx.x] = kept[(at[i] + i) & 63];
}
__global__ void __launch_bounds__(1024, 2) crowded(float* x) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = kept[i] * kept[95 - i];
}
"""


@needs_nvcc
def test_planted_local_memory_is_seen(tmp_path: Path, gencode: list[str]) -> None:
    (tmp_path / "planted.cu").write_text(PLANTED)
    usages, count = compile_kernels(tmp_path / "planted.cu", tmp_path, gencode), len(processors(gencode))
    assert len(usages) == 3 * count
    seen = {(name, usage.architecture) for usage, name in zip(usages, demangled(usages), strict=True) if usage.local}
    assert {name for name, _ in seen} == {"indexed", "crowded"}
    assert len(seen) == 2 * count == len(local_memory(usages))


def test_parser() -> None:
    report = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_80'
ptxas info    : Function properties for _Z1aPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_90'
ptxas info    : Function properties for _Z1bPf
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for __internal_helper
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 368 bytes cmem[0]
"""
    assert parse(report) == [Usage("_Z1aPf", "sm_80", 32, 0, 0, 0, 4096), Usage("_Z1bPf", "sm_90", 255, 264, 4, 12, 0)]
