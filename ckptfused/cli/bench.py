"""Time a training step of a Llama-style model: plain, torch.utils.checkpoint, ckptfused.

Runs `python -m benchmarks step-time` of the source checkout that this package was imported from.
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
    parser.epilog = (
        "All options are handed to `python -m benchmarks step-time`: --case, --dtype, --budget, --threads, --out …"
    )


def run(arguments: argparse.Namespace) -> int:
    if not BENCHMARKS.exists():
        raise CommandError(f"the benchmarks are in the source checkout, not in the installed package (no {BENCHMARKS})")
    path = os.pathsep.join(filter(None, (str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks", "step-time", *arguments.options]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
