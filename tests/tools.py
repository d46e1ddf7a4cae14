"""What some tests need beside Python's packages, and Triton.

Where it is missing they are skipped. CI must not skip them, and sets CKPTFUSED_REQUIRE_TESTS=ON, as for CMake.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

import setup_cuda

VARIABLE = "CKPTFUSED_REQUIRE_TESTS"
GTEST = Path("/usr/include/gtest/gtest.h")


@functools.cache
def nvcc() -> Path | None:
    toolkit = setup_cuda.find_toolkit()
    return None if toolkit is None else toolkit / "bin" / "nvcc"


@functools.cache
def nvdisasm() -> Path | None:
    """The disassembler of CUDA's machine code: of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    toolkit, on_path = setup_cuda.find_toolkit(), shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    packages = list(spec.submodule_search_locations or []) if spec is not None else []
    known = [Path(on_path)] if on_path else []
    known += [toolkit / "bin" / "nvdisasm"] if toolkit is not None else []
    known += [path for folder in packages for path in Path(folder).glob("*/bin/nvdisasm")]
    return next((path for path in known if path.exists()), None)


def missing() -> list[str]:
    """Names of what is required and not there."""
    if os.environ.get(VARIABLE) != "ON":
        return []
    there: dict[str, object] = {
        "nvcc": nvcc(),
        "nvdisasm": nvdisasm(),
        "g++": shutil.which("g++"),
        "GoogleTest": GTEST.exists(),
    }
    if torch.version.cuda is not None:  # such a torch brings Triton
        there["triton"] = importlib.util.find_spec("triton")
    return [name for name, found in there.items() if not found]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def need(*packages: str) -> None:
    """Skips the test where one of these packages is not installed; fails there if nothing may be skipped."""
    lacking = sorted(package for package in packages if not installed(package))
    if lacking and os.environ.get(VARIABLE) == "ON":
        pytest.fail(f"{VARIABLE}=ON, but here is no {', no '.join(lacking)}")
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}")
