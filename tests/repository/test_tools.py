"""CI fails where a tool is missing, whose tests are skipped elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tools

EVERYTHING = {
    "nvcc": Path("nvcc"),
    "nvdisasm": Path("nvdisasm"),
    "g++": Path("g++"),
    "GoogleTest": Path(__file__),
    "triton": Path("triton"),
}


@pytest.mark.parametrize("absent", [*EVERYTHING, None])
@pytest.mark.parametrize("cuda", ["13.0", None])
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, cuda: str | None, absent: str | None) -> None:
    found = {name: None if name == absent else path for name, path in EVERYTHING.items()}
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(tools, "nvcc", lambda: found["nvcc"])
    monkeypatch.setattr(tools, "nvdisasm", lambda: found["nvdisasm"])
    monkeypatch.setattr(tools.shutil, "which", found.get)
    monkeypatch.setattr(tools, "GTEST", found["GoogleTest"] or Path("/none"))
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: found[name])
    monkeypatch.setenv(tools.VARIABLE, "ON")
    needed = absent is not None and not (absent == "triton" and cuda is None)
    assert tools.missing() == ([absent] if needed else [])
    monkeypatch.setenv(tools.VARIABLE, "OFF")
    assert tools.missing() == []


@pytest.mark.parametrize("required", [True, False])
def test_pytest_does_not_start(required: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", tools.VARIABLE))}
    environment |= {"CUDA_HOME": "/none"} | ({tools.VARIABLE: "ON"} if required else {})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode == 0) != required, run.stdout + run.stderr
    assert ("here is no nvcc" in run.stderr) == required
