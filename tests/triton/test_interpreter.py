"""Runs tests/triton/interpreted in a process of its own: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_interpreted(name: str) -> None:
    if name == "test_liger.py":
        pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for inherited in [key for key in environment if key.startswith(("PYTEST_", "COV_CORE_"))]:
        del environment[inherited]  # xdist's, of the worker that this test runs in
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / name)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
