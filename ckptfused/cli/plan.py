"""Find the fastest way to train a model whose step fits into a budget of memory.

Neither a GPU nor weights are needed: steps run on the meta device, what they would allocate is counted, and their time
is estimated for the device named. Exit status 3: nothing fits, and what would help is said; 1: the model could not be
had, or does not run without data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptfused.cli import files, options
from ckptfused.cli.errors import NO, CommandError
from ckptfused.sizes import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prediction(parser, checkpoint=False)
    add = parser.add_argument
    budget = options.checked(lambda text: parse_bytes("budget", text))
    add("--budget", type=budget, metavar="BYTES", help="80GiB, say; without it the card's own memory, less a twentieth")
    host = options.checked(lambda text: parse_bytes("host-memory", text))
    add("--host-memory", type=host, metavar="BYTES", help="for inputs of layers, with offload; without it any")
    add(
        "--shards",
        type=options.positive,
        default=1,
        metavar="RANKS",
        help="ranks over which FSDP2 shards the model (1)",
    )
    add("--json", action="store_true", help="print JSON, in bytes and seconds, with the policy")
    add("--policy", type=files.output, metavar="FILE", help="write the policy's JSON, for CheckpointPolicy.from_json")
    add(
        "--plot",
        type=files.picture_path,
        metavar="FILE",
        help="write a picture of memory against time; needs matplotlib",
    )
    parser.epilog = "Example: python -m ckptfused plan --config llama-3-8b --batch 2 --seq 8192 --budget 130GiB"


def run(arguments: argparse.Namespace) -> int:
    plan, BudgetError = options.whole_package().plan, options.whole_package().BudgetError
    model, batch = options.model_and_batch(arguments, needs_batch=True)
    step = {"batch": batch, "optimizer": options.optimizer(arguments)}
    names = ("device", "shards", "autocast", "gradient_accumulation_steps", "release", "host_memory")
    step |= {name: getattr(arguments, name) for name in names}
    try:
        with _progress(quiet=arguments.json) as said:
            found = options.ran(arguments, lambda: plan(model, budget=arguments.budget, said=said, **step))
    except BudgetError as error:
        if arguments.json:
            print(json.dumps({"fits": False, "budget": arguments.budget, "least": error.least}))
        print(f"ckptfused plan: {error}", file=sys.stderr)
        return NO
    print(found.to_json() if arguments.json else found)
    try:
        if arguments.policy:
            with open(arguments.policy, "w", encoding="utf-8") as file:
                file.write(found.policy.to_json())
        if arguments.plot:
            found.plot(arguments.plot)
    except OSError as error:
        raise CommandError(str(error)) from error
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says on a terminal which policy a step is run with."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        yield lambda text: None
        return
    console = Console(stderr=True, quiet=quiet or not sys.stderr.isatty())
    with console.status("running steps without data …") as status:
        yield lambda text: status.update(f"a step without data: {text.partition(', loss=')[0]}")
