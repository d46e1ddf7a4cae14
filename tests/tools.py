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


def missing() -> list[str]:
    """Names of what is required and not there."""
    if os.environ.get(VARIABLE) != "ON":
        return []
    there: dict[str, object] = {"nvcc": nvcc(), "g++": shutil.which("g++"), "GoogleTest": GTEST.exists()}
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
