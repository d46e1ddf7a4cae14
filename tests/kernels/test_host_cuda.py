"""Tests of the tests of the CUDA C++ kernels, which run on the CPU (csrc/tests/host_cuda.h).

A defect is planted in a copy of a kernel file; the copy is compiled with g++ and the C++ tests that are there anyway.
The comparison has to fail, and ThreadSanitizer has to see a barrier that is gone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools import GTEST

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.extended,  # ctest runs the kernels; that it notices their faults is `make mutants`'s
    pytest.mark.skipif(sys.platform != "linux", reason="ThreadSanitizer and ucontext of Linux are used"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing"),
    pytest.mark.skipif(not GTEST.exists(), reason="GoogleTest is missing"),
]

FLAGS = ["-O1", "-fno-math-errno", "-fno-trapping-math"]
CPU_SOURCES = ("norm", "rows", "target")


@dataclass(frozen=True)
class Defect:
    """One replacement in a file, of which every occurrence counts."""

    id: str
    file: str
    text: str
    replacement: str

    def plant(self, csrc: Path) -> None:
        file = csrc / self.file
        before = file.read_text()
        assert self.text in before, f"{self.file} no longer has:\n{self.text}"
        file.write_text(before.replace(self.text, self.replacement))


MISSING_BARRIERS = (
    Defect(
        "between the sums of warps and their sum",
        file="kernels/cuda/row_sums.cuh",
        text="  __syncthreads();\n  A values[kCount];",
        replacement="  A values[kCount];",
    ),
    Defect(
        "between the lanes of a column and their sum",
        file="kernels/cuda/sum_grads.cu",
        text="  __syncthreads();\n",
        replacement="",
    ),
)
WRONG_RESULTS = (
    Defect(
        "the last column left out of the statistics",
        file="kernels/cuda/row_sums.cuh",
        text="const A d = i < count ? x[i] - mean : A(0);",
        replacement="const A d = i < count - 1 ? x[i] - mean : A(0);",
    ),
    Defect(
        "the last partial row left out",
        file="kernels/cuda/sum_grads.cu",
        text="row < job.count; row +=",
        replacement="row < job.count - 1; row +=",
    ),
    Defect(
        "a chunk that ends a row early",
        file="kernels/cuda/norm_grad.cuh",
        text="end = a.rows * (blockIdx.x + int64_t(1)) / a.chunks;",
        replacement="end = a.rows * (blockIdx.x + int64_t(1)) / a.chunks - (blockIdx.x == 1 ? 1 : 0);",
    ),
)


# Only tests of tensors with more than 2^32 elements see these.
NARROW_INDICES = (
    Defect(
        "the element where a row starts, in 32 bits",
        file="kernels/cuda/norm_fwd.cu",
        text="row * a.cols",
        replacement="int(row * a.cols)",
    ),
    Defect(
        "the element of a partial sum, in 32 bits",
        file="kernels/cuda/sum_grads.cu",
        text="from[row * job.cols + col]",
        replacement="from[uint32_t(row * job.cols + col)]",
    ),
)


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Objects:
    """What no defect changes, each compiled once: the CPU kernels that the tests compare with, and the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kernels = CSRC / "kernels" / "cpu"
        self.cpu_kernels = [self._object(kernels / f"{name}.cpp", "-std=c++17") for name in CPU_SOURCES]

    def tests(self, name: str, *flags: str) -> str:
        return self._object(CSRC / "tests" / "cuda" / f"{name}.cpp", *flags)

    def _object(self, source: Path, *flags: str) -> str:
        output = self.folder / f"{source.stem}{''.join(flags)}.o"
        if not output.exists():
            _compile([*flags, "-I", str(CSRC), "-c", str(source), "-o", str(output)])
        return str(output)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return Objects(tmp_path_factory.mktemp("objects"))


def _run(
    folder: Path, objects: Objects, defect: Defect | None, sanitize: bool, large: bool = False
) -> subprocess.CompletedProcess:
    """Build the norm's tests with the defect, run those of one type pair, or those of large tensors."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    if defect is not None:
        defect.plant(csrc)
    kernels = csrc / "kernels" / "cuda"
    program = str(folder / "test")
    flags = ["-std=c++20", "-Wno-sign-compare", *(["-fsanitize=thread"] if sanitize else [])]
    tests = objects.tests("test_large_norm" if large else "test_norm", *flags)
    _compile(
        [
            *[*flags, "-I", str(csrc), "-x", "c++", str(kernels / "norm_fwd.cu"), str(kernels / "norm_bwd.cu")],
            str(kernels / "sum_grads.cu"),
            *["-x", "none", tests, *objects.cpu_kernels, "-lgtest", "-lgtest_main", "-lpthread", "-o", program],
        ]
    )
    only = "*" if large else "CudaNormRows.*:CudaNorm/0.InPlace*" if sanitize else "CudaNormRows.*:CudaNorm/3.*"
    return subprocess.run([program, f"--gtest_filter={only}"], capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "tsan"])
def test_unchanged_kernels_pass(sanitize: bool, objects: Objects, tmp_path: Path) -> None:
    done = _run(tmp_path, objects, None, sanitize)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("defect", MISSING_BARRIERS, ids=lambda defect: defect.id)
def test_a_missing_barrier_is_a_data_race(defect: Defect, objects: Objects, tmp_path: Path) -> None:
    done = _run(tmp_path, objects, defect, sanitize=True)
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("defect", WRONG_RESULTS, ids=lambda defect: defect.id)
def test_a_wrong_result_is_noticed(defect: Defect, objects: Objects, tmp_path: Path) -> None:
    done = _run(tmp_path, objects, defect, sanitize=False)
    assert done.returncode == 1 and "[  FAILED  ]" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("defect", NARROW_INDICES, ids=lambda defect: defect.id)
def test_an_index_of_32_bits_is_noticed(defect: Defect, objects: Objects, tmp_path: Path) -> None:
    done = _run(tmp_path, objects, defect, sanitize=False, large=True)
    assert done.returncode == 1 and "[  FAILED  ]" in done.stdout, done.stdout + done.stderr
