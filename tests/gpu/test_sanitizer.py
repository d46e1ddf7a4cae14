"""compute-sanitizer finds nothing in the CUDA C++ kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import setup_cuda
from tests.gpu import sanitized

ROOT = Path(__file__).resolve().parents[2]
FOUND = 71  # the exit status that says so
LIMIT = 110  # seconds: pytest's own, where it has one, is 120
SOURCES = (ROOT / "csrc" / "kernels" / "cuda").glob("*.cu*")
KERNELS = {
    name for path in SOURCES for name in re.findall(r"__global__[^{]*?\b(\w+_kernel)\(", path.read_text())
}  # fmt: skip


def test_the_calls_are_right() -> None:
    """All of them, on the CPU."""
    sanitized.run("cpu")


@pytest.mark.gpu
def test_every_kernel_is_launched() -> None:
    assert len(KERNELS) == 14
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        sanitized.run("cuda")
        torch.cuda.synchronize()
    ran = " ".join({event.name for event in profile.events()})
    if "_kernel" not in ran:
        pytest.skip("the profiler sees no kernels here")
    assert not {name for name in KERNELS if name not in ran}


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str) -> None:
    program = setup_cuda.sanitizer()
    if not program:
        pytest.skip("no compute-sanitizer")
    script = Path(__file__).with_name("sanitized.py")
    # Every tensor an allocation of its own, so that memcheck knows where it ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kns=ckptfused"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # libraries try calls to see whether they fail
    try:
        done = subprocess.run(
            [program, *options, sys.executable, str(script)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"not done in {LIMIT} s: {(expired.stdout or b'')[-4000:]!r}")
    said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    if "Device not supported" in said or "not supported on this" in said:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, said
    assert "every kernel ran" in done.stdout, said
    assert "0 errors" in said or "0 hazards" in said, said
