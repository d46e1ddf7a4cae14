"""CI fails where a tool is missing, whose tests are skipped elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import forks, tools

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
def test_pytest_does_not_start(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PYTEST_", tools.VARIABLE))]:
        monkeypatch.delenv(name)
    environment = {"CUDA_HOME": "/none"} | ({tools.VARIABLE: "ON"} if required else {})
    run = forks.command("-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", __file__, **environment)
    assert (run.returncode == 0) != required, run.stdout + run.stderr
    assert ("here is no nvcc" in run.stderr) == required
