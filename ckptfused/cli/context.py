"""Say how long a sequence a model can be trained on in a card's memory, for each way of training it.

Neither a GPU nor weights are needed: whole training steps run on the meta device, and what they would allocate is
counted. Not counted are the CUDA context, workspaces of libraries and fragmentation: name less memory than the card
has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ckptfused.cli.errors import CommandError
from ckptfused.policy.search import Longest, longest
from ckptfused.policy.variants import MODELS, VARIANTS, Trained, read_config
from ckptfused.sizes import parse_bytes

T = TypeVar("T")
GIB = 2**30
DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = ", ".join(MODELS)
    add("--config", required=True, metavar="MODEL", help=f"a config.json of Hugging Face's, or one of {models}")
    add("--memory", required=True, type=_checked(lambda text: parse_bytes("memory", text)), help="80GiB, say")
    add("--lora", type=_positive, metavar="RANK", help="train adapters of this rank alone; default: all weights")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    add("--batch", type=_positive, default=1, help="sequences a step")
    add("--step", type=_positive, default=256, help="the answer is a multiple of so many tokens")
    add("--json", action="store_true", help="print JSON, with the parts of each peak in bytes")


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which says nothing of why where another error is raised."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = read_config(arguments.config)
    except ValueError as error:
        raise CommandError(f"--config: {error}") from None
    found = {}
    for variant in VARIANTS:
        if not arguments.json and sys.stderr.isatty():
            print(f"{variant} …", end="\r", file=sys.stderr, flush=True)
        found[variant] = _longest(config, variant, arguments)
    print(json.dumps(as_json(found, arguments), indent=2) if arguments.json else table(found, arguments))
    return 0


def _longest(config: dict[str, Any], variant: str, arguments: argparse.Namespace) -> Longest:
    try:
        model = Trained(config, variant, getattr(torch, arguments.dtype), arguments.lora)
    except ModuleNotFoundError as error:
        raise CommandError(f"needs {error.name}: pip install {error.name}") from error
    except ValueError as error:  # transformers' own words, the first of them
        raise CommandError(f"--config: {str(error).splitlines()[0]}") from error
    return longest(lambda tokens: model.step(tokens, arguments.batch), arguments.memory, arguments.step)


def as_json(found: dict[str, Longest], arguments: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(arguments, name) for name in ("config", "memory", "lora", "dtype", "batch")}
    rows = {name: {"tokens": best.tokens, **best.profile.sizes()} for name, best in found.items()}
    return asked | {"optimizer": "fused AdamW", "variants": rows}


def table(found: dict[str, Longest], arguments: argparse.Namespace) -> str:
    """What a person reads."""
    trained = "all weights" if arguments.lora is None else f"LoRA of rank {arguments.lora}"
    width = max(map(len, found))
    lines = [
        f"{arguments.config}, {arguments.dtype}, {trained}, fused AdamW, batch {arguments.batch}, "
        f"{arguments.memory / GIB:,.1f} GiB",
        "",
        f"{'':{width}}  longest sequence",
    ]
    for name, (tokens, step) in found.items():
        if tokens:
            said = f"{tokens:>16,}  {step.peak / GIB:,.1f} GiB, at {step.moment}"
        else:
            said = f"{'none':>16}  the shortest needs {step.peak / GIB:,.1f} GiB, at {step.moment}"
        lines.append(f"{name:{width}}  {said}")
    lines += ["", "Not counted: the CUDA context, workspaces of libraries, fragmentation."]
    return "\n".join(lines)
