"""Say how long a sequence a model can be trained on in a card's memory, for each way of training it.

Neither a GPU nor weights are needed: whole training steps run on the meta device, and what they would allocate is
counted. Not counted are the CUDA context, workspaces of libraries and fragmentation: name less memory than the card
has.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from ckptfused.cli.options import add_model, add_training, built, checked, configuration, positive, ran
from ckptfused.policy.result import Profile
from ckptfused.policy.search import Longest, longest
from ckptfused.policy.table import conditions
from ckptfused.policy.variants import VARIANTS, Trained
from ckptfused.sizes import parse_bytes

GIB = 2**30
STEP = ("autocast", "gradient_accumulation_steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, factory=False)
    add_training(parser)
    add = parser.add_argument
    add("--memory", required=True, type=checked(lambda text: parse_bytes("memory", text)), help="80GiB, say")
    add("--batch", type=positive, default=1, help="sequences a step (1)")
    add("--step", type=positive, default=256, help="the answer is a multiple of so many tokens (256)")
    add("--json", action="store_true", help="print JSON, with the parts of each peak in bytes")


def run(arguments: argparse.Namespace) -> int:
    config = configuration(arguments)
    found = {}
    for variant in VARIANTS:
        if not arguments.json and sys.stderr.isatty():
            print(f"{variant} …", end="\r", file=sys.stderr, flush=True)
        found[variant] = _longest(config, variant, arguments)
    print(json.dumps(as_json(found, arguments), indent=2) if arguments.json else table(found, arguments))
    return 0


def _longest(config: dict[str, Any], variant: str, arguments: argparse.Namespace) -> Longest:
    model = built(lambda: Trained(config, variant, getattr(torch, arguments.dtype), arguments.lora))
    options = {name: getattr(arguments, name) for name in STEP}

    def step(tokens: int) -> Profile:
        return model.step(tokens, arguments.batch, **options)

    return ran(arguments, lambda: longest(step, arguments.memory, arguments.step))


def as_json(found: dict[str, Longest], arguments: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(arguments, name) for name in ("config", "memory", "lora", "dtype", "batch", *STEP)}
    rows = {
        name: {"tokens": best.tokens, "refused": best.refused, **best.profile.sizes()} for name, best in found.items()
    }
    return asked | {"optimizer": "fused AdamW", "variants": rows}


def table(found: dict[str, Longest], arguments: argparse.Namespace) -> str:
    """What a person reads."""
    trained = "all weights" if arguments.lora is None else f"LoRA of rank {arguments.lora}"
    width, step = max(map(len, found)), next(iter(found.values())).profile
    lines = [
        f"{arguments.config}, {arguments.dtype}{conditions(step)}, {trained}, fused AdamW, batch {arguments.batch}, "
        f"{arguments.memory / GIB:,.1f} GiB",
        "",
        f"{'':{width}}  longest sequence",
    ]
    for name, (tokens, step, refused) in found.items():
        if tokens:
            said = f"{tokens:>16,}  {step.peak / GIB:,.1f} GiB, at {step.moment}"
            said += ", all that the model takes" if refused else ""
        else:
            said = f"{'none':>16}  the shortest needs {step.peak / GIB:,.1f} GiB, at {step.moment}"
        lines.append(f"{name:{width}}  {said}")
    why = next((best.refused for best in found.values() if best.refused), "")
    lines += ["", f"Why no more tokens: {why}"] if why else []
    lines += ["", "Not counted: the CUDA context, workspaces of libraries, fragmentation."]
    return "\n".join(lines)
