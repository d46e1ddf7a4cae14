"""Say what memory and time a training step of a model takes, by layer and by moment.

Neither a GPU nor weights are needed: the step runs on the meta device, what it would allocate is counted, and its time
is estimated for the device named. Exit status 1: the model could not be had, or does not run without data.
"""

from __future__ import annotations

import argparse
import sys

from ckptfused.cli import files, options
from ckptfused.cli.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prediction(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument(
        "--plot",
        type=files.picture_path,
        metavar="FILE",
        help="write a picture of the step's timeline; needs matplotlib",
    )
    parser.epilog = "Example: python -m ckptfused profile --config llama-3-8b --batch 2 --seq 8192 --lora 16"


def run(arguments: argparse.Namespace) -> int:
    if not arguments.json and sys.stderr.isatty():
        print("running a step without data …", end="\r", file=sys.stderr, flush=True)
    model, batch = options.model_and_batch(arguments, needs_batch=True)
    step = {name: getattr(arguments, name) for name in ("device", "autocast", "gradient_accumulation_steps", "release")}
    found = options.ran(
        arguments, lambda: options.whole_package().profile(model, batch, options.optimizer(arguments), **step)
    )
    print(found.to_json() if arguments.json else found)
    if arguments.plot:
        try:
            found.plot(arguments.plot)
        except OSError as error:
            raise CommandError(f"--plot: {error}") from error
    return 0
