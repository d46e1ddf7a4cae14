"""The commands' output where nobody reads it to its end, and where nobody asked for one."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfused.cli import main
from ckptfused.cli.files import output
from tests import forks

pytestmark = pytest.mark.once
FACTORY = """
import torch
def make():
    return torch.nn.Linear(8, 8), torch.empty(4, 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--help"], ["profile", "--config", "factory:make", "--json"]], ids=["help", "json"]
)
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(options: list[str], tmp_path: Path) -> None:
    """`head` leaves so after a pipe."""
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
        f"\n    {name} " in said for name in ("context", "profile", "plan", "doctor", "layer", "demo", "bench")
    )


@pytest.mark.parametrize("command", ["profile", "plan"])
@pytest.mark.parametrize(
    ("name", "said"), [("step.xyz", "ending in one of .*png"), ("nowhere/step.png", "a folder that can be written")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    command: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    budget = ["--budget", "1GiB"] if command == "plan" else []
    with pytest.raises(SystemExit) as stopped:  # the model is not looked for
        main([command, "--config", "nowhere.json", *budget, "--plot", name])
    assert stopped.value.code == 2 and re.search(f"--plot: expected .*{said}.*'{name}'", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "status", "said"),
    [(["--help"], 0, "usage: "), ([], 2, "required: module.Class"), (["torch.nn.Lin"], 1, "got 'torch.nn.Lin'")],
    ids=str,
)
def test_fingerprints_are_written_only_when_classes_are_named(names: list[str], status: int, said: str) -> None:
    package = Path(__file__).parents[2]
    known = package / "ckptfused" / "layer" / "known.json"
    before = known.stat().st_mtime_ns
    found = forks.command("-m", "ckptfused.models", *names)
    assert found.returncode == status and said in found.stdout + found.stderr and "Traceback" not in found.stderr
    assert known.stat().st_mtime_ns == before


def test_a_trial_leaves_what_is_the_users(tmp_path: Path) -> None:
    """A link to a file that is not there yet, a file, a pipe whose reader waits."""
    link, own, pipe = tmp_path / "link", tmp_path / "own", tmp_path / "pipe"
    link.symlink_to(tmp_path / "later.json")
    own.write_text("mine")
    os.mkfifo(pipe)
    for path in (link, own, pipe, tmp_path / "new"):
        assert output(str(path)) == str(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "own", "pipe"]
    assert link.is_symlink() and own.read_text() == "mine"
    for name in ("x" * 300, str(tmp_path), "/proc/x.png"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a file in a folder that can be written"):
            output(name)
