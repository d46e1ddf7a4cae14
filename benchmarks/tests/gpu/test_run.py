"""`make gpu` without a GPU: what is reported, which parts there are, and how one that fails ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import parts

ROOT = Path(__file__).resolve().parents[3]
UNASKED = [part.name for part in parts.PARTS if part.unasked]


def python(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_without_a_gpu_every_part_is_reported_as_not_run() -> None:
    done = python("-m", "benchmarks.gpu")
    assert done.returncode == 0, done.stderr
    for name in UNASKED:
        assert f"| {name} | not run |  | no CUDA device |" in done.stdout
    assert "| tune |" not in done.stdout
    done = python("-m", "benchmarks.gpu", "tests", "tune")
    assert done.returncode == 0
    assert done.stdout.count("not run") == 2
    assert "| tune | not run |" in done.stdout


def test_without_torch_every_part_is_reported_as_not_run() -> None:
    """``-S``: a Python without its site-packages."""
    assert "No module named 'torch'" in python("-S", "-c", "import torch").stderr
    done = python("-S", "-m", "benchmarks.gpu")
    assert done.returncode == 0, done.stderr
    for name in UNASKED:
        assert f"| {name} | not run |  | no torch in /" in done.stdout


def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu", "build"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| build | not run |  | torch cannot be imported by" in done.stdout


def test_an_unknown_part_is_refused() -> None:
    done = python("-m", "benchmarks.gpu", "bulid")
    assert done.returncode == 2
    assert "expected some of build, smoke" in done.stderr


def test_the_parts_fit_into_nine_minutes() -> None:
    from benchmarks.gpu.__main__ import BUDGET

    assert BUDGET + 20 <= 9 * 60
    assert sum(part.least for part in parts.PARTS if part.unasked) < BUDGET / 2


def test_what_is_measured_has_its_file() -> None:
    """Parts that pytest does not run have a file, and each a parser that takes what the part hands it."""
    others = {"build", "tests", "suite", "sanitizer"}
    assert {part.name for part in parts.PARTS} == others | set(parts.MEASURED)
    for name in parts.MEASURED:
        assert (ROOT / "benchmarks" / "gpu" / f"{name}.py").exists(), name


def test_every_test_for_a_gpu_is_run() -> None:
    """Each file with the marker is of `tests`, of `sanitizer` or below a path of `suite`."""
    suite = parts.suite()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text, place = path.read_text(), path.relative_to(ROOT)
        if "mark.gpu" not in text and "on_devices" not in text:
            continue
        if place.parts[1] == "gpu":
            assert path.stem.removeprefix("test_") in (*parts.TESTS, "sanitizer"), place
        elif place.parts[1] not in (*parts.WITHOUT_GPU, "devices.py"):
            assert any(place.is_relative_to(one) for one in suite), place
    assert all((ROOT / path).exists() for path in suite)
    assert all((ROOT / f"tests/gpu/test_{name}.py").exists() for name in parts.TESTS)


def test_tests_are_handed_out_in_the_order_given() -> None:
    """pytest-xdist does so with these options: a portion each, the first first."""
    pytest.importorskip("xdist")
    command = parts.command_of(next(part for part in parts.PARTS if part.name == "tests"), 60, "stem", ROOT)
    assert command[command.index("--dist") + 1] == "load"
    assert command[command.index("--maxschedchunk") + 1] == "1"


def test_a_part_that_fails_hangs_or_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PATIENCE", 0.5)
    log_path = tmp_path / "log"
    with open(log_path, "a") as log:
        environment = dict(os.environ)
        assert parts.run([sys.executable, "-c", "print('well')"], 20, environment, log) == ("ok", ["well"])
        status, lines = parts.run([sys.executable, "-c", "raise SystemExit('no')"], 20, environment, log)
        assert (status, lines) == ("failed (exit status 1)", ["no"])
        child = "import subprocess, time; print('on it', flush=True); subprocess.run(['sleep', '60'])"
        start = time.monotonic()
        status, lines = parts.run([sys.executable, "-c", child], 1, environment, log)
        assert status == "out of time"
        assert lines[0] == "on it"
        assert time.monotonic() - start < 20
    assert [line for line in log_path.read_text().splitlines() if line in ("well", "no", "on it")] == [
        "well",
        "no",
        "on it",
    ]
