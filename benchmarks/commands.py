"""What the measurements share: the options of their commands, and the two files of a result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment

RESULTS = Path(__file__).resolve().parent / "results"


def command_line(doc: str | None, budget: float) -> argparse.ArgumentParser:
    """A parser with the options of every measurement; its help is the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--budget", type=float, default=budget, help="seconds of timed steps, of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--label", default="", help="ends the name of the result files: the processor, say")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def write(
    result: dict[str, Any], markdown: Callable[[dict[str, Any]], str], arguments: argparse.Namespace, *names: str
) -> None:
    """The result as JSON and as a page, which is printed too. names: of the files, before the label."""
    stem = "-".join(filter(None, (*names, arguments.label)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
    text = markdown(result)
    (arguments.out / f"{stem}.md").write_text(text)
    print(text, flush=True)


def page(lines: Sequence[str], result: dict[str, Any], said: str = "") -> str:
    """A result as a page: a table's lines, what is to be said of all of them, and where they come from."""
    return "\n".join([*lines, *(["", said] if said else []), "", environment.footer(result["environment"]), ""])


def interleaved(result: dict[str, Any], what: str = "steps") -> str:
    """How often each variant was timed, at least."""
    return f"{min(row['steps'] for row in result['seconds'].values())} {what} each, interleaved."


def times(row: dict[str, float]) -> str:
    """Median and percentiles as cells of a table."""
    return " | ".join(f"{row[name]:.3f}" for name in ("median", "p20", "p80"))
