"""Time and measure training steps: the benchmarks of the source checkout that this package was imported from.

`bench NAME …` runs `python -m benchmarks NAME …`: `bench step` trains one model in every way that there is, `bench
--list` says what else is measured. Without a name a Llama-style stack is timed plain, under torch.utils.checkpoint and
as ckptfused trains it (`step-time`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ckptfused.cli.errors import CommandError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "A name and options are handed on: bench step --case gpt2 --dtype bfloat16 --budget 60 …"


def run(arguments: argparse.Namespace) -> int:
    if not BENCHMARKS.exists():
        raise CommandError(f"the benchmarks are in the source checkout, not in the installed package (no {BENCHMARKS})")
    words = arguments.options
    named = words and (not words[0].startswith("-") or words[0] == "--list")
    path = os.pathsep.join(filter(None, (str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks", *(words if named else ("step-time", *words))]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
