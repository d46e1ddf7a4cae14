"""Builds for the GPU at hand, tests and measures there: what `make gpu` runs.

    python benchmarks/gpu.py [--out FOLDER] [--budget SECONDS] [PART ...]

Uses the Python it is run with, its torch and its triton; installs and downloads nothing. Every part is a process of its
own with a limit of time; one that fails or runs out of time does not stop the rest. Results go to
<out>/<date>_<gpu>_<case>.json and <out>/<date>_<gpu>.md, all output to gpu.log; a summary comes last. Where there is
no GPU, or no torch, every part is reported as not run.

"tune" runs only where it is named. It measures the FFN of the block's benchmark by cuBLAS and by Triton and leaves
<out>/ffn_tuned.json, which CKPTFUSED_CACHE=<out> has blocks choose by, also those of a later run of the other parts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import goal_table, table, tuned_table

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 520.0  # seconds of all parts: nine minutes, less what starting and the summary take
CASES = ("micro", "attention", "block", "block-cudnn", "tune")
NO_GPU = "no CUDA device"


@dataclass(frozen=True)
class Part:
    """A piece of work: the most seconds it may take, and the seconds that parts before it have to leave it."""

    name: str
    most: float
    least: float
    environment: dict[str, str] = field(default_factory=dict)
    unasked: bool = True  # whether it runs where no part is named


# In this order: what is short and tells most comes first, and the suite takes what is left.
PARTS = (
    Part("build", 220, 60),
    Part("tests", 110, 30),
    Part("block", 80, 30),
    Part("micro", 50, 20),
    Part("attention", 50, 20),
    Part("block-cudnn", 60, 0, {"CKPTFUSED_ATTENTION": "cudnn"}),
    Part("sanitizer", 130, 20),
    Part("tune", 240, 60, unasked=False),
    Part("suite", 420, 0),
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


def gpu() -> tuple[str, str] | str:
    """Name and compute capability of the first GPU, or why there is none to use."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: of a library that torch loads
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        what = "no torch in" if missing else "torch cannot be imported by"
        return f"{what} {sys.executable}; another Python: make gpu PYTHON=..."

    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), f"{major}.{minor}"


def pytest_command(*arguments: str, workers: int) -> list[str]:
    """pytest on tests with the gpu marker. Warnings fail none: the versions at hand are not ours to choose."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    command += ["-W", "default", "--tb=short", "-rfE", "--disable-warnings", "--continue-on-collection-errors"]
    if workers > 1 and importable("xdist"):
        command += ["-n", str(workers), "--dist", "worksteal"]
    if importable("pytest_timeout"):
        command += ["--timeout", "120", "--timeout-method", "thread"]
    return [*command, *arguments]


def command_of(part: Part, seconds: float, stem: str, out: Path) -> list[str]:
    """What runs a part in about so many seconds."""
    workers = min(cores(), 12)
    if part.name == "build":
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        return [*build, "--build-temp", f"build/gpu-{sys.implementation.cache_tag}"]
    if part.name == "tests":
        return pytest_command("tests/gpu", "--ignore=tests/gpu/test_sanitizer.py", workers=workers)
    if part.name == "sanitizer":
        return pytest_command("tests/gpu/test_sanitizer.py", workers=2)
    if part.name == "suite":
        # Those left out have no such test, or import packages that may be missing here.
        others = [f"tests/{folder}" for folder in ("cli", "convert", "generic", "gpu", "triton/interpreted")]
        if not all(map(importable, ("hypothesis", "numpy", "scipy"))):
            others.append("tests/test_rng.py")
        return pytest_command("tests", *(f"--ignore={path}" for path in others), workers=workers)
    script = f"benchmarks/gpu_{part.name.split('-')[0]}.py"
    # Half of the time is for starting, making inputs and checking.
    return [sys.executable, script, "--out", str(out), "--stem", stem, "--seconds", f"{max(seconds / 2, 2):.0f}"]


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
            process.wait(timeout=12)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left behind, and itself if it would not end
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(log.name, "rb") as written:
        written.seek(start)
        return status, written.read().decode(errors="replace").splitlines()


def built_for(capability: str) -> str:
    """Why the extension at hand cannot be used on this GPU; empty if it can. In a process of its own: one that has
    imported an extension keeps it."""
    code = "import ckptfused; print(*ckptfused.build_info()['cuda_architectures'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["the extension cannot be imported"])[-1]
    wanted, names = f"sm_{capability.replace('.', '')}", done.stdout.split()
    fits = any(name.rstrip("a") == wanted or name.startswith("compute_") for name in names)
    return "" if fits else f"the extension is built for {' '.join(names) or 'the CPU alone'}, not for {wanted}"


def told(part: str, lines: Sequence[str]) -> str:
    """The line of a part's output that sums it up."""
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error|deselected)", line)]
    if part in ("tests", "suite", "sanitizer") and counts:
        return counts[-1].strip("= ")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run_part(part: Part, seconds: float, capability: str, stem: str, out: Path, log: TextIO) -> Outcome:
    start = time.monotonic()
    environment = dict(os.environ) | part.environment
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    if part.name == "build":
        environment |= {"TORCH_CUDA_ARCH_LIST": capability, "CKPTFUSED_CUDA": "1"}
        environment.setdefault("MAX_JOBS", str(cores()))
    if part.name in ("tests", "suite"):  # the processes share the cores
        environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    status, lines = run(command_of(part, seconds, stem, out), seconds, environment, log)
    shown = lines[-45:] if status != "ok" or part.name in CASES else lines[-3:]
    print("\n".join(shown), flush=True)
    return Outcome(status, time.monotonic() - start, told(part.name, lines))


def results(stem: str, out: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the benchmarks among these parts wrote."""
    paths = {name: out / f"{stem}_{name}.json" for name in names if name in CASES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def summary(device: str, outcomes: dict[str, Outcome], found: dict[str, dict[str, Any]]) -> str:
    """The parts and the goals as Markdown."""
    rows: list[list[object]] = [
        [name, o.status, f"{o.seconds:.0f} s" if o.seconds else "", o.detail.replace("|", "\\|")[:150]]
        for name, o in outcomes.items()
    ]
    lines = [f"# GPU: {device}", "", table(["part", "status", "took", "last word"], rows), ""]
    goals = [goal | {"name": f"{case}: {goal['name']}"} for case, result in found.items() for goal in result["goals"]]
    if goals:
        lines += [goal_table(goals), ""]
    for case, result in found.items():
        lines += details(case, result)
    if found:
        where = next(iter(found.values()))["environment"]
        versions = f"torch {where['torch']}, ckptfused {where['ckptfused']}, commit {where['commit']}"
        lines += [f"{versions}, {where['cpu']['model']}, {where['threads']} threads.", ""]
    return "\n".join(lines)


def details(case: str, result: dict[str, Any]) -> list[str]:
    """The times of one result file as a table."""
    if case == "tune":
        return [f"## {case}", "", tuned_table(result["shapes"]), ""]
    if case == "micro":
        rows: list[list[object]] = [
            [r["op"], f"{r['milliseconds']['ckptfused']['median']:.4f}", f"{r['GB/s']:.0f}", f"{r['copy GB/s']:.0f}",
             f"{100 * r['of copy']:.0f} %", f"{100 * r['eager of copy']:.0f} %"]
            for r in result["ops"]
        ]  # fmt: skip
        head = ["kernel", "ms", "GB/s", "copy GB/s", "of copy", "eager of copy"]
    elif case == "attention":
        rows = [
            [f"{name}, dropout {r['p']}", f"{t['median']:.3f}", f"{t['p20']:.3f}", f"{t['p80']:.3f}",
             f"{r['TFLOP/s'][name]:.0f}"]
            for r in result["attention"]
            for name, t in r["milliseconds"].items()
        ]  # fmt: skip
        rows += [
            [f"cuBLAS {name}", f"{r['median']:.3f}", f"{r['p20']:.3f}", f"{r['p80']:.3f}", f"{r['TFLOP/s']:.0f}"]
            for name, r in result["cublas"].items()
        ]
        head = ["kernel", "ms", "p20", "p80", "TFLOP/s"]
    else:
        rows = []
        for name, t in result["milliseconds"].items():
            used, ideal = result["bytes"].get(name, {}), result["ideal milliseconds"].get(name)
            sizes = [f"{used[key] / 2**20:.0f}" if used else "" for key in ("saved", "peak")]
            rows.append(
                [name, f"{t['median']:.2f}", f"{t['p20']:.2f}", f"{t['p80']:.2f}", ideal if ideal else "", *sizes]
            )
        head = ["variant", "ms", "p20", "p80", "ideal ms", "saved MiB", "peak MiB"]
    title = f"## {case}" + (f" ({result['attention kernel']} attention)" if "attention kernel" in result else "")
    return [title, "", table(head, rows), ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"among {', '.join(p.name for p in PARTS)}; if none, all but tune"
    )
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts together")
    options = parser.parse_args()
    names = {part.name for part in PARTS}
    if unknown := set(options.parts) - names:
        parser.error(f"parts: expected some of {', '.join(p.name for p in PARTS)}, got {' '.join(sorted(unknown))}")
    chosen = [part for part in PARTS if (part.name in options.parts if options.parts else part.unasked)]

    found_gpu = gpu()
    outcomes: dict[str, Outcome] = {}
    if isinstance(found_gpu, str):
        outcomes = {part.name: Outcome("not run", detail=found_gpu) for part in chosen}
        print(summary("none", outcomes, {}))
        return 0
    name, capability = found_gpu
    stem = f"{datetime.date.today():%Y-%m-%d}_{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    out: Path = (options.out or ROOT / "benchmarks" / "results").resolve()
    log_path = (out if options.out else ROOT / "build") / "gpu.log"
    for folder in (out, log_path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    log_path.unlink(missing_ok=True)
    unusable: str | None = None  # not known yet
    with open(log_path, "a") as log:  # to append: the parts write to it, too
        for index, part in enumerate(chosen):
            left = end - time.monotonic() - sum(later.least for later in chosen[index + 1 :])
            if left < 5:
                outcomes[part.name] = Outcome("not run", detail="no time left")
                continue
            if part.name != "build":
                unusable = built_for(capability) if unusable is None else unusable
                if unusable:
                    outcomes[part.name] = Outcome("not run", detail=unusable)
                    continue
            if part.name in CASES:  # never the numbers of an earlier run
                (out / f"{stem}_{part.name}.json").unlink(missing_ok=True)
            seconds = min(part.most, left)
            print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
            outcomes[part.name] = run_part(part, seconds, capability, stem, out, log)
            taken = outcomes[part.name]
            print(f"== {part.name}: {taken.status}, {taken.seconds:.0f} s", flush=True)
    page = summary(f"{name}, compute capability {capability}", outcomes, results(stem, out, [p.name for p in chosen]))
    (out / f"{stem}.md").write_text(page)
    print(f"\n{page}")
    return 0 if all(outcome.status in ("ok", "not run") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
