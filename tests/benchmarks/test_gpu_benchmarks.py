"""`make gpu` without a GPU, and its benchmarks in small on the CPU: what can be seen of them where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_tune
from benchmarks.gpu_block import HuggingFaceBlock
from benchmarks.gpu_timing import Clock, Goal, expect_close
from ckptfused.cli.models import Shape, plain_layers
from ckptfused.triton import tuning

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


def test_what_tuning_finds_is_in_a_table_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times made up: measuring takes a GPU."""
    chip = tuning.Device("chip", (9, 0))

    def measured(n: int, c: int, f: int, act: str, dtype: torch.dtype) -> dict[str, object]:
        if n == 32:
            raise RuntimeError("no memory")
        entry = {
            "choice": "m1",
            "triton": "m1",
            "cublas_ms": 2.0,
            "triton_ms": 1.5,
            "all_ms": {"cublas": {"forward": 0.8, "kept": 1.2}, "m1": {"forward": 0.6, "kept": 0.9}},
        }
        tuning.save(tuning.shape_key(n, c, f, act, dtype, chip), entry)
        return entry

    monkeypatch.setattr(tuning, "tune_ffn", measured)
    monkeypatch.setenv("CKPTFUSED_CACHE", str(tmp_path / "mine"))
    options = ["gpu_tune.py", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out"), "--stem", "day_chip"]
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(SystemExit, match="failed: 32 x 64 x 96, swiglu"):
        gpu_tune.main()
    entries = json.loads((tmp_path / "out" / "ffn_tuned.json").read_text())["entries"]
    assert list(entries) == ["chip | bfloat16 | swiglu | n 64 | c 64 | f 96"]
    assert not (tmp_path / "mine").exists()
    found = gpu.results("day_chip", tmp_path / "out", ["tune"])
    page = gpu.summary("a chip", {"tune": gpu.Outcome("failed", 3.0, "")}, found)
    assert "| FFN | kernel | forward, ms | kept, ms | chosen |" in page
    assert "| 64 x 64 x 96, swiglu | m1 | 0.600 | 0.900 | yes |" in page
    assert "| 64 x 64 x 96, swiglu | cublas | 0.800 | 1.200 |  |" in page


def test_the_shapes_that_are_tuned() -> None:
    """Those that the block's benchmark asks the table for."""
    wanted = {(16384, 4096, 14336), (4096, 4096, 14336)}
    assert set(gpu_tune.shapes(gpu_tune.LLAMA)) == wanted


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


def test_the_eager_layer_is_the_same_layer() -> None:
    """The Hugging Face way to write it gives the values of the plain one."""
    shape = Shape(64, 4, 96, layers=1, num_kv_heads=2)
    plain = plain_layers(shape, dtype=torch.float64)[0]
    eager = HuggingFaceBlock(plain)  # type: ignore[arg-type]
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    # Its norms are in float32 whatever comes in.
    torch.testing.assert_close(eager(x), plain(x), rtol=1e-5, atol=1e-6)
    assert sum(w.numel() for w in eager.weights()) == sum(w.numel() for w in plain.parameters())


def test_goals_and_checks() -> None:
    assert Goal("speed", 1.1, 1.08, True).met
    assert not Goal("time", 1.3, 1.28, False).met
    assert not Goal("nothing", float("nan"), 1.0, True).met
    right = torch.ones(4)
    expect_close("fine", right + 1e-4, right, 1e-3)
    with pytest.raises(SystemExit, match="wrong result, no time reported"):
        expect_close("nan", torch.tensor([1.0, 1.0, torch.nan, 1.0]), right, 1e-3)


def test_variants_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}  # type: ignore[misc]
    times = Clock("cpu").compare(calls, seconds=0, rounds=3)
    assert "".join(order[6:]) == "abcbcacab"
    assert all(t.rounds == 3 and t.p20 <= t.median <= t.p80 for t in times.values())
