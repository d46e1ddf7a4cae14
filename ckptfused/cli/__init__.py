"""The command line: ``python -m ckptfused context|profile|plan|doctor|layer|tune|demo|bench``.

Its modules import PyTorch, and what does, within the functions that work: options are read without.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from ckptfused.cli import bench, context, demo, doctor, layer, plan, profile, tune
from ckptfused.cli.errors import FAILED, MISUSED, STATUSES, CommandError
from ckptfused.cli.options import configuration
from ckptfused.compat.versions import VERSION
from ckptfused.spec.checks import nearest

DESCRIPTION = "Activation checkpointing with fused recompute."


class Parser(argparse.ArgumentParser):
    """argparse's, which says in one line what is wrong, and which name was probably meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str):  # type: ignore[no-untyped-def]
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            message += nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        known = re.findall(r"--[\w-]+", self.format_usage())
        for word in (word.partition("=")[0] for word in self._given):
            if word.startswith("--") and not any(name.startswith(word) for name in known):
                message += f"; there is no {word}{nearest(word, known)}"
        self.exit(MISUSED, f"{self.prog}: error: {message}\n")


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
    parser = Parser(prog="ckptfused", description=DESCRIPTION, epilog=STATUSES)
    parser.add_argument("--version", action="store_true", help="print what is installed, and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for module in (context, profile, plan, doctor, layer, tune, demo, bench):
        name = module.__name__.rpartition(".")[2]
        doc = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=doc.splitlines()[0], description=doc)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.version:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "(not installed)"
        print(f"ckptfused {VERSION}, PyTorch {torch}, Python {sys.version.split()[0]}")
        return 0
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return MISUSED
    if arguments.command == "bench":
        arguments.options = rest
    elif rest:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if hasattr(arguments, "config"):
            arguments.configuration = configuration(arguments)
        return arguments.run(arguments)
    except CommandError as error:
        print(f"ckptfused {arguments.command}: {error}", file=sys.stderr)
        return FAILED
