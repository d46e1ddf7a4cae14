"""What ptxas makes of the CUDA kernels: no spills and no local memory, for every architecture that is built by default.

Local memory is where registers spill to and where arrays live whose indices are not known when compiling: both cost
what shared memory or a register would not. The table of all kernels is printed when pytest ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import setup_cuda
from tests.conftest import SUMMARY
from tests.kernels.cubins import (
    KERNELS,
    NVCC,
    Usage,
    compile_kernels,
    compile_once,
    demangled,
    gencode_of,
    parse,
    processors,
)

pytestmark = pytest.mark.once
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


# Of the two that are built by default; planted kernels are compiled for the newer one in `make test`, too.
ARCHITECTURES = [pytest.param("8.0", marks=pytest.mark.extended), "9.0+PTX"]


@pytest.fixture(params=ARCHITECTURES)
def gencode(request: pytest.FixtureRequest) -> list[str]:
    """nvcc's flags for one architecture."""
    return gencode_of(request.param)


def test_architectures_are_those_that_are_built() -> None:
    assert ";".join(getattr(each, "values", [each])[0] for each in ARCHITECTURES) == setup_cuda.ARCHITECTURES


def table(usages: Sequence[Usage]) -> str:
    lines = [f"{'registers':>9} {'stack':>5} {'spills':>6} {'shared':>6}  kernel"]
    for usage, name in zip(usages, demangled([usage.kernel for usage in usages]), strict=True):
        spills = usage.spill_stores + usage.spill_loads
        lines.append(f"{usage.registers:9} {usage.stack:5} {spills:6} {usage.shared:6}  {usage.architecture} {name}")
    return "\n".join(lines)


def local_memory(usages: Sequence[Usage]) -> list[str]:
    """A line for each kernel that uses local memory."""
    return table([usage for usage in usages if usage.local]).splitlines()[1:]


@needs_nvcc
@pytest.mark.extended
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_registers_alone(
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
    gencode: list[str],
    record_property: Callable[[str, object], None],
) -> None:
    usages = compile_once(source, tmp_path_factory, gencode).usages
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
    usages, count = compile_kernels(tmp_path / "planted.cu", tmp_path, gencode).usages, len(processors(gencode))
    assert len(usages) == 3 * count
    seen = {
        (name, usage.architecture)
        for usage, name in zip(usages, demangled([usage.kernel for usage in usages]), strict=True)
        if usage.local
    }
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
