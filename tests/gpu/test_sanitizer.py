"""compute-sanitizer finds nothing in the CUDA C++ kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
FOUND = 71  # the exit status that says so


def sanitizer() -> str:
    """Where compute-sanitizer is; empty where it is not."""
    from torch.utils.cpp_extension import CUDA_HOME

    beside = Path(CUDA_HOME or "/usr/local/cuda") / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else "")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str) -> None:
    program = sanitizer()
    if not program:
        pytest.skip("no compute-sanitizer")
    script = Path(__file__).with_name("sanitized.py")
    # Every tensor an allocation of its own, so that memcheck knows where it ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kns=ckptfused"]
    done = subprocess.run(
        [program, *options, sys.executable, str(script)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    if "Device not supported" in said or "not supported on this" in said:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, said
    assert "every kernel ran" in done.stdout, said
    assert "0 errors" in said or "0 hazards" in said, said
