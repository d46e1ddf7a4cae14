"""Runs tests/triton/launched in a process of its own: no other may take its libcuda.so.1 for CUDA's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_launched() -> None:
    environment = os.environ | {"CKPTFUSED_FAKE_CUDA": "1", "OMP_NUM_THREADS": "1"}
    for inherited in [key for key in environment if key.startswith(("PYTEST_", "COV_CORE_"))]:
        del environment[inherited]  # xdist's, of the worker that this test runs in
    folder = Path(__file__).parent / "launched"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    run = subprocess.run(command, cwd=folder.parents[2], env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
