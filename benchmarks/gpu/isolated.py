"""Checks in processes of their own, so that one that takes the GPU down does not end the others.

A command `python -m MODULE --only NAME` does one of them, prints `RESULT` and what it found as JSON in one line, and
ends with an exit status. One that fails is run again, first with every kernel waited for, so that the error names the
kernel that made it, then under compute-sanitizer, which names the thread and the address.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setup_cuda import sanitizer

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "
EXAMINED = 3
"""At most so many that fail are run again: the first errors are usually all of one cause."""
MEMCHECK = ("--tool", "memcheck", "--report-api-errors", "no")
LINES = 12
UNHURRIED = 600.0
"""Seconds of a process where no GPU is paid for."""


@dataclass
class Ended:
    """How one ended. result: the last that it gave, also where it did not end well. error: the last lines of its
    output; empty where all is well."""

    name: str
    result: dict[str, Any]
    error: str = ""
    again: dict[str, str] = field(default_factory=dict)
    """The last lines of the runs after an error, by how they were made."""


def give(result: dict[str, Any]) -> None:
    """From the process that was asked for one."""
    print(MARK + json.dumps(result), flush=True)


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Keeps others that hold the same file off the GPU, while they may already import what they need."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def command(module: str, name: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, "--only", name, *options]


def run(name: str, words: Sequence[str], seconds: float, more: dict[str, str] | None = None) -> Ended:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (more or {})
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        return Ended(name, _given(text) or {}, f"not done in {seconds:.0f} s: {_last(text)}")
    found = _given(done.stdout)
    if done.returncode == 0 and found is not None:
        return Ended(name, found)
    return Ended(name, found or {}, _last(done.stdout) or f"exit status {done.returncode}")


def _given(text: str) -> dict[str, Any] | None:
    """The last result in an output, whole lines alone."""
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(MARK) and line.endswith("\n")]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else None


def _last(text: str) -> str:
    return "\n".join(line[:500] for line in text.splitlines() if line.strip() and not line.startswith(MARK))[-4000:]


def run_each(
    module: str, names: Sequence[str], options: Sequence[str], at_once: int, seconds: float
) -> Iterator[Ended]:
    """Each in a process of its own, so many at once, as they end."""
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        futures = [pool.submit(run, name, command(module, name, options), seconds) for name in names]
        for future in as_completed(futures):
            yield future.result()


def examine(module: str, ended: Sequence[Ended], options: Sequence[str], seconds: float) -> None:
    """Runs those that failed again, and notes what they say then."""
    program = sanitizer()
    for one in [one for one in ended if one.error][:EXAMINED]:
        words = command(module, one.name, options)
        again = run(one.name, words, seconds, {"CUDA_LAUNCH_BLOCKING": "1"})
        one.again["each kernel waited for"] = _short(again.error) or "no error"
        if program:
            # Every tensor an allocation of its own, so that memcheck knows where it ends.
            apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            checked = run(one.name, [program, *MEMCHECK, *words], seconds, apart)
            said = checked.error if checked.error else "no error"
            one.again["memcheck"] = "\n".join(said.splitlines()[: 2 * LINES])


def _short(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


def failures(ended: Sequence[Ended]) -> dict[str, Any]:
    """By name, for a result file: the error's last lines and what the runs after it said."""
    return {one.name: {"error": _short(one.error), **one.again} for one in ended if one.error}


def shown(ended: Sequence[Ended]) -> str:
    """The same for people."""
    lines = []
    for name, said in failures(ended).items():
        lines.append(f"FAILED {name}")
        lines += [f"  {how}: {line}" for how, text in said.items() for line in text.splitlines()]
    return "\n".join(lines)
