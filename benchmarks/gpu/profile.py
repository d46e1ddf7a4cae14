"""Where a step's time goes: the kernels of every variant of the block, and Nsight Compute on the worst of ours.

    python -m benchmarks.gpu.profile --seconds 60

The table is PyTorch's profiler's, of one step of each variant. `ncu`, where it is there, looks at the attention kernels
with dropout and at the row kernels that are furthest from a copy, those of <out>/<stem>_micro.json where it exists.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases import LLAMA_3_8B, TINY
from benchmarks.gpu.block import Variants
from benchmarks.gpu.isolated import ROOT
from benchmarks.gpu.summary import kernel_table
from benchmarks.gpu.timing import arguments, path_of, write

TOP = 25
WORST = ("layer_norm_backward", "rms_norm_backward", "residual_dropout_norm", "glu_backward")
"""Where nothing was measured: those with the least room in machine code."""
COUNTED = 4
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats")
# Clocks stay as they are found. Our CUDA C++ kernels are in a namespace; Triton's have none.
NCU = ("--clock-control", "none", "--kernel-name-base", "demangled", "--launch-count", "4")
KINDS = {"rows": "regex:ckptfused::", "attention": "regex:^attention_"}


def profiled(variants: Variants, name: str) -> dict[str, Any]:
    """Kernels of one step by their time, and what the host took for it."""
    device = variants.x.device.type
    variants.step(name)
    start = time.thread_time()
    variants.step(name)
    host = time.thread_time() - start
    kind = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    if device == "cuda":
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kind]) as profile:
        variants.step(name)
        if device == "cuda":
            torch.cuda.synchronize()
    rows = [
        {"kernel": event.key, "calls": event.count, "milliseconds": _microseconds(event, device) / 1e3}
        for event in profile.key_averages()
    ]
    rows = [row for row in rows if row["milliseconds"] > 0]
    rows.sort(key=lambda row: -row["milliseconds"])
    return {
        "kernels": sum(row["calls"] for row in rows),
        "milliseconds": sum(row["milliseconds"] for row in rows),
        "host milliseconds": 1e3 * host,
        "top": rows[:TOP],
    }


def _microseconds(event: Any, device: str) -> float:
    return event.self_device_time_total if device == "cuda" else event.self_cpu_time_total


def worst(options: Namespace) -> list[str]:
    """Names of the row kernels that reach least of a copy's bandwidth."""
    path = path_of(options, "micro")
    if not path.exists():
        return list(WORST)
    found = sorted(json.loads(path.read_text())["ops"], key=lambda row: row["of copy"])
    return [row["op"] for row in found][:COUNTED] or list(WORST)


def counted(options: Namespace) -> dict[str, list[str]]:
    """The command lines of what ncu is to look at."""
    size = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    python = [sys.executable, "-m"]
    micro = {name: [*python, "benchmarks.gpu.micro", "--only", name, "--untimed", *size] for name in worst(options)}
    return {"attention": [*python, "benchmarks.gpu.attention", "--once", *size], **micro}


def ncu(name: str, words: Sequence[str], seconds: float) -> list[str]:
    """What Nsight Compute says of up to four kernels of a command."""
    program = shutil.which("ncu")
    if program is None:
        return ["no ncu"]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    kind = KINDS.get(name, KINDS["rows"])
    command = [program, *NCU, *sections, "--kernel-name", kind, *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return [f"not done in {seconds:.0f} s"]
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("==PROF==")]
    return lines if done.returncode == 0 else [*lines[-20:], *done.stderr.splitlines()[-10:]]


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    start = time.monotonic()
    variants = Variants(TINY if options.tiny else LLAMA_3_8B, options.device)
    found: dict[str, Any] = {}
    counters: dict[str, list[str]] = {}
    failed: dict[str, str] = {}

    def save() -> None:
        result = {"variants": found, "ncu": counters, "failed": failed, "goals": []}
        write(options, "profile", result)

    for name in variants.forwards:
        try:
            found[name] = profiled(variants, name)
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0]
        save()
    for name, words in counted(options).items():
        left = 2 * options.seconds - (time.monotonic() - start)
        if left > 5:
            counters[name] = ncu(name, words, min(left, 45))
            save()
    print(kernel_table(found))
    for name, lines in counters.items():
        print(f"ncu, {name}: {len(lines)} lines" if len(lines) > 1 else f"ncu, {name}: {lines[0] if lines else ''}")
    print(f"written: {path_of(options, 'profile')}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
