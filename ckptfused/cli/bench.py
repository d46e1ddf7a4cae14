"""Time a training step of a Llama-style model: plain, torch.utils.checkpoint, ckptfused.

Runs benchmarks/step_time.py of the source checkout that this package was imported from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ckptfused.cli.errors import CommandError

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_time.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "All options are handed to benchmarks/step_time.py: --case, --dtype, --budget, --seed, --threads, --out."
    )


def run(arguments: argparse.Namespace) -> int:
    if not SCRIPT.exists():
        raise CommandError(f"the benchmarks are in the source checkout, not in the installed package (no {SCRIPT})")
    return subprocess.run([sys.executable, str(SCRIPT), *arguments.options], check=False).returncode
