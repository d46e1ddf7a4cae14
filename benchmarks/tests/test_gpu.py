"""`make gpu` without a GPU, and its benchmarks in small on the CPU: what can be seen of them where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]
UNASKED = [part.name for part in gpu.PARTS if part.unasked]
CASES = {"gpu_micro.py": "micro", "gpu_attention.py": "attention", "gpu_block.py": "block"}


def python(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_without_a_gpu_every_part_is_reported_as_not_run() -> None:
    done = python("benchmarks/gpu.py")
    assert done.returncode == 0, done.stderr
    for name in UNASKED:
        assert f"| {name} | not run |  | no CUDA device |" in done.stdout
    assert "| tune |" not in done.stdout
    done = python("benchmarks/gpu.py", "tests", "tune")
    assert done.returncode == 0
    assert done.stdout.count("not run") == 2
    assert "| tune | not run |" in done.stdout


def test_without_torch_every_part_is_reported_as_not_run() -> None:
    """``-S``: a Python without its site-packages."""
    assert "No module named 'torch'" in python("-S", "-c", "import torch").stderr
    done = python("-S", "benchmarks/gpu.py")
    assert done.returncode == 0, done.stderr
    for name in UNASKED:
        assert f"| {name} | not run |  | no torch in /" in done.stdout


def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "benchmarks/gpu.py", "build"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| build | not run |  | torch cannot be imported by" in done.stdout


def test_an_unknown_part_is_refused() -> None:
    done = python("benchmarks/gpu.py", "bulid")
    assert done.returncode == 2
    assert "expected some of build, tests" in done.stderr


def test_the_parts_fit_into_nine_minutes() -> None:
    assert gpu.BUDGET + 20 <= 9 * 60
    assert sum(part.least for part in gpu.PARTS) < gpu.BUDGET / 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu")
    for script in CASES:
        options = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--out", str(out), "--stem", "day_chip"]
        done = python(f"benchmarks/{script}", *options)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.once
@pytest.mark.parametrize("case", CASES.values())
def test_a_result_file(written: Path, case: str) -> None:
    text = (written / f"day_chip_{case}.json").read_text()
    assert str(written) not in text
    result = json.loads(text)
    assert result["case"] == case
    assert not result["failed"]
    assert {"commit", "torch", "ckptfused", "cpu", "command"} <= result["environment"].keys()
    assert all({"name", "value", "goal", "met", "ideal"} <= goal.keys() for goal in result["goals"])


def test_the_page_has_every_time(written: Path) -> None:
    found = gpu.results("day_chip", written, [part.name for part in gpu.PARTS])
    assert found.keys() == set(CASES.values())
    page = gpu.summary("a chip", {"micro": gpu.Outcome("ok", 3.0, "a | b")}, found)
    for text in ("| micro | ok | 3 s | a \\| b |", "rms_norm_backward", "eager checkpoint", "cuBLAS gate/up"):
        assert text in page
    assert "block: ckptfused inputs / ckptfused all" in page


def test_a_part_that_fails_hangs_or_forks(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    with open(log_path, "a") as log:
        environment = dict(os.environ)
        assert gpu.run([sys.executable, "-c", "print('well')"], 20, environment, log) == ("ok", ["well"])
        status, lines = gpu.run([sys.executable, "-c", "raise SystemExit('no')"], 20, environment, log)
        assert (status, lines) == ("failed (exit status 1)", ["no"])
        child = "import subprocess, time; print('on it', flush=True); subprocess.run(['sleep', '60'])"
        start = time.monotonic()
        status, lines = gpu.run([sys.executable, "-c", child], 1, environment, log)
        assert status == "out of time"
        assert lines[0] == "on it"
        assert time.monotonic() - start < 20
    assert [line for line in log_path.read_text().splitlines() if line in ("well", "no", "on it")] == [
        "well",
        "no",
        "on it",
    ]
