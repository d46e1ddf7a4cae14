"""The command line: ``python -m ckptfused context|profile|plan|doctor|demo|bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ckptfused.cli import bench, context, demo, doctor, plan, profile
from ckptfused.cli.errors import FAILED, MISUSED, STATUSES, CommandError

DESCRIPTION = "Activation checkpointing with fused recompute."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has enough of it, as `head` has; at exit Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="ckptfused", description=DESCRIPTION, epilog=STATUSES)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for module in (context, profile, plan, doctor, demo, bench):
        name = module.__name__.rpartition(".")[2]
        doc = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=doc.splitlines()[0], description=doc)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return MISUSED
    if arguments.command == "bench":
        arguments.options = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return arguments.run(arguments)
    except CommandError as error:
        print(f"ckptfused {arguments.command}: {error}", file=sys.stderr)
        return FAILED
