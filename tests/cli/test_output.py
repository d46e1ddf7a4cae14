"""The commands' output where nobody reads it to its end, and where nobody asked for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfused.cli import main

pytestmark = pytest.mark.once
FACTORY = """
import torch
def make():
    return torch.nn.Linear(8, 8), torch.empty(4, 8)
"""


@pytest.mark.parametrize(
    "options", [["--help"], ["profile", "--config", "factory:make", "--json"]], ids=["help", "json"]
)
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(options: list[str], tmp_path: Path) -> None:
    """As `| head` does."""
    (tmp_path / "factory.py").write_text(FACTORY)
    read, write = os.pipe()
    os.close(read)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = subprocess.run(
        [sys.executable, "-m", "ckptfused", *options],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path},
    )
    os.close(write)
    assert (found.returncode, found.stderr) == (1, "")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, said = capsys.readouterr()
    assert out == "" and all(
        f"\n    {name} " in said for name in ("context", "profile", "plan", "doctor", "demo", "bench")
    )
