"""The parts of `make gpu`: in which order they run, with which command, and how a process of its own ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("smoke", "block", "micro", "attention", "profile", "grid", "models", "tune")
"""The parts that leave a result file: benchmarks/gpu/<name>.py."""
WORKERS = 14
"""Processes that run tests: each holds a context of some 600 MB on the GPU, and they share it."""
PATIENCE = 12.0
"""Seconds that a part has to say what it has seen when its time is up."""


@dataclass(frozen=True)
class Part:
    """A piece of work: the most seconds it may take, and the seconds that parts before it have to leave it."""

    name: str
    most: float
    least: float
    environment: dict[str, str] = field(default_factory=dict)
    unasked: bool = True  # whether it runs where no part is named


# In this order: what is short and tells most comes first, and the suite takes what is left. Smoke and micro take a
# third of their most where nothing fails.
PARTS = (
    Part("build", 220, 30),
    Part("smoke", 150, 20),
    Part("block", 90, 30),
    Part("micro", 180, 20),
    Part("attention", 60, 20),
    Part("profile", 150, 0),
    Part("grid", 200, 30, unasked=False),
    Part("models", 300, 60, unasked=False),
    Part("tests", 150, 30),
    Part("tune", 240, 60, unasked=False),
    Part("suite", 420, 0),
    Part("sanitizer", 130, 20),
)
# tests/gpu, what would be the worst to learn last first.
TESTS = (
    "keep",
    "query_tiles",
    "checkpoint",
    "launch_records",
    "memory",
    "graphs",
    "masks",
    "sync",
    "cudnn",
    "convert",
    "offload",
    "triton_ffn",
    "adapters",
    "experts",
)
# Folders of the suite with tests for a GPU, likewise; the rest of them follow.
SUITE = ("autograd", "triton", "ops", "kernels", "modules", "loss")
# These have no such test, or import packages that may be missing there.
WITHOUT_GPU = (
    "cli",
    "docs",
    "doctor",
    "examples",
    "gpu",
    "integrations",
    "models",
    "mutants",
    "planner",
    "profiler",
    "repository",
)


@dataclass
class Outcome:
    """How a part ended: ok, failed, out of time or not run; and what to say about it."""

    status: str
    seconds: float = 0.0
    detail: str = ""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def pytest_command(*arguments: str, workers: int) -> list[str]:
    """pytest on tests with the gpu marker, in the order given.

    Warnings fail none: the versions at hand are not ours to choose.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--every-case"]
    command += ["-p", "no:benchmark", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--tb=short", "-rfE", "--disable-warnings", "--continue-on-collection-errors"]
    if workers > 1 and importable("xdist"):
        command += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1"]
    if importable("pytest_timeout"):
        command += ["--timeout", "120", "--timeout-method", "thread"]
    return [*command, *arguments]


def suite() -> list[str]:
    """Paths of the suite's tests, in order of value."""
    tests = ROOT / "tests"
    folders = sorted(path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    rest = [name for name in folders if name not in (*SUITE, *WITHOUT_GPU)]
    files = sorted(path.name for path in tests.glob("test_*.py"))
    if not all(map(importable, ("hypothesis", "numpy", "scipy"))):
        files.remove("test_rng.py")
    return [f"tests/{name}" for name in (*SUITE, *rest, *files)]


def command_of(part: Part, seconds: float, stem: str, out: Path, rehearsal: bool = False) -> list[str]:
    """What runs a part in about so many seconds; of a rehearsal, on the CPU and in tiny sizes."""
    workers = min(cores(), WORKERS)
    if part.name == "build":
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        return [*build, "--build-temp", f"build/gpu-{sys.implementation.cache_tag}"]
    if part.name == "tests":
        return pytest_command(*(f"tests/gpu/test_{name}.py" for name in TESTS), workers=workers)
    if part.name == "sanitizer":
        return pytest_command("tests/gpu/test_sanitizer.py", workers=2)
    if part.name == "suite":
        return pytest_command(*suite(), "--ignore=tests/triton/interpreted", workers=workers)
    # Half of the time is for starting, making inputs and checking.
    options = ["--out", str(out), "--stem", stem, "--seconds", "1" if rehearsal else f"{max(seconds / 2, 2):.0f}"]
    options += ["--device", "cpu", "--tiny"] if rehearsal else []
    return [sys.executable, "-m", f"benchmarks.gpu.{part.name}", *options]


def environment_of(part: Part, capability: str) -> dict[str, str]:
    environment = dict(os.environ) | part.environment
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    if part.name == "build":
        environment |= {"TORCH_CUDA_ARCH_LIST": capability, "CKPTFUSED_CUDA": "1"}
        environment.setdefault("MAX_JOBS", str(cores()))
    if part.name in ("tests", "suite"):  # the processes share the cores
        environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return environment


def run(command: Sequence[str], seconds: float, environment: dict[str, str], log: TextIO) -> tuple[str, list[str]]:
    """Runs a process in a group of its own, ends it when its time is up, and returns status and output.

    First as ctrl-C would end it, so that pytest says what it has seen so far.
    """
    log.write(f"\n$ {' '.join(command)}\n")
    log.flush()
    start = os.path.getsize(log.name)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )  # fmt: skip
    try:
        status = "ok" if process.wait(timeout=max(seconds, 1)) == 0 else f"failed (exit status {process.returncode})"
    except subprocess.TimeoutExpired:
        status = "out of time"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left behind, and itself if it would not end
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(log.name, "rb") as written:
        written.seek(start)
        return status, written.read().decode(errors="replace").splitlines()


def told(part: str, lines: Sequence[str]) -> str:
    """The line of a part's output that sums it up."""
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error|deselected)", line)]
    if part in ("tests", "suite", "sanitizer") and counts:
        return counts[-1].strip("= ")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run_part(
    part: Part, seconds: float, capability: str, stem: str, out: Path, log: TextIO, rehearsal: bool = False
) -> Outcome:
    start = time.monotonic()
    command = command_of(part, seconds, stem, out, rehearsal)
    status, lines = run(command, seconds, environment_of(part, capability), log)
    shown = lines[-45:] if status != "ok" or part.name in MEASURED else lines[-3:]
    print("\n".join(shown), flush=True)
    return Outcome(status, time.monotonic() - start, told(part.name, lines))
