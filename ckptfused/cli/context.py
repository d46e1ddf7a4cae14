"""Say how long a sequence, or how large a batch, a model can be trained on in a card's memory, by ways of training.

Neither a GPU nor weights are needed: whole training steps run on the meta device, and what they would allocate is
counted. Not counted are the CUDA context, workspaces of libraries and fragmentation: for them a twentieth of a card's
memory is left free where no memory is named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptfused.cli import files, options
from ckptfused.cli.errors import CommandError
from ckptfused.simulate.cards import usable
from ckptfused.sizes import parse_bytes, size

if TYPE_CHECKING:
    from ckptfused.cli.longest_context import Longest
    from ckptfused.profiler.result import Profile

STEP = ("device", "autocast", "gradient_accumulation_steps", "release")
AS_IT_IS = "as it is"
"""What the first way of training is called of a user's own model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prediction(parser, checkpoint=False)
    add = parser.add_argument
    memory = options.checked(lambda text: parse_bytes("memory", text))
    add("--memory", type=memory, metavar="BYTES", help="80GiB, say; without it the card's own, less a twentieth")
    host = options.checked(lambda text: parse_bytes("host-memory", text))
    add("--host-memory", type=host, metavar="BYTES", help="for inputs of layers, with offload; without it any")
    add(
        "--largest",
        choices=("sequence", "batch"),
        default="sequence",
        help="what is looked for: the longest sequence, of --batch sequences, or the largest batch, of --seq tokens",
    )
    add("--step", type=options.positive, help="the answer is a multiple of so many tokens (256) or sequences (1)")
    add("--json", action="store_true", help="print JSON, with the parts of each peak in bytes")
    add(
        "--plot",
        type=files.picture_path,
        metavar="FILE",
        help="write a picture of memory against what is looked for; needs matplotlib",
    )
    parser.epilog = "Example: python -m ckptfused context --config llama-3-8b --device h100 --largest batch --seq 4096"


def run(arguments: argparse.Namespace) -> int:
    options.whole_package()
    from ckptfused.cli.language_models import PAIRED, VARIANTS
    from ckptfused.simulate.devices import device_named

    try:
        arguments.card = device_named(arguments.device)
    except ValueError as error:
        raise CommandError(f"--{error}") from None
    if arguments.memory is None and not arguments.card.memory:
        raise CommandError(
            f"--memory: give a number of bytes such as 8GiB, for the memory of {arguments.device} is not known"
        )
    arguments.memory = arguments.memory or usable(arguments.card.memory)
    arguments.step = arguments.step or (256 if arguments.largest == "sequence" else 1)
    given = None if arguments.configuration else options.model_and_batch(arguments, needs_batch=True)
    found = {}
    for variant in VARIANTS:
        if variant == PAIRED and arguments.host_memory is None:
            continue  # it is for a host that is short of memory
        if not arguments.json and sys.stderr.isatty():
            print(f"{variant} …", end="\r", file=sys.stderr, flush=True)
        best = _longest(given, variant, arguments)
        if best is not None:
            found[AS_IT_IS if given and variant == VARIANTS[0] else variant] = best
    print(json.dumps(as_json(found, arguments), indent=2) if arguments.json else table_text(found, arguments))
    if arguments.plot:
        from ckptfused.cli.context_picture import draw

        try:
            draw(found, arguments)
        except OSError as error:
            raise CommandError(str(error)) from error
    return 0


def _longest(given: Any, variant: str, arguments: argparse.Namespace) -> Longest | None:
    """given: the user's own model and its batch, or None. None: there is no such variant of it."""
    from ckptfused.cli.language_models import OFFLOADED, PAIRED
    from ckptfused.cli.longest_context import longest
    from ckptfused.simulate.cpu_timings import untimed

    on_cpu = arguments.card.kind == "cpu"
    found = None if on_cpu and variant in (OFFLOADED, PAIRED) else _steps(given, variant, arguments)
    if found is None:
        return None
    step, least = found
    limits: dict[str, Any] = {"first": 2048 if arguments.largest == "sequence" else 8, "least": least}
    if arguments.host_memory is not None:
        limits["host"] = arguments.host_memory

    def searched() -> Longest:
        with untimed():
            best = longest(step, arguments.memory, arguments.step, **limits)
        # On a CPU what is found is timed, once; on a card it was.
        return best._replace(profile=step(best.tokens or arguments.step)) if on_cpu else best

    return options.ran(arguments, searched)


_Steps = tuple[Callable[[int], "Profile"], Callable[[int], int]]


def _steps(given: Any, variant: str, arguments: argparse.Namespace) -> _Steps | None:
    """What predicts a step of so many tokens, or sequences, and what knows bytes that it takes at least."""
    import torch

    from ckptfused.cli import language_models
    from ckptfused.cli.longest_context import resized_batch

    make = options.optimizer(arguments)
    how = {name: getattr(arguments, name) for name in STEP}
    of = "tokens" if arguments.largest == "sequence" else "sequences"
    if given is not None:
        (own, batch), profile = given, options.whole_package().profile
        model = options.ran(arguments, lambda: language_models.varied(own, variant))
        if model is None:
            return None
        return lambda count: profile(model, resized_batch(batch, **{of: count}), make, **how), lambda _: 0
    dtype = getattr(torch, arguments.dtype)
    kind = (variant, dtype, arguments.lora, arguments.load_in_4bit)
    trained = options.built(lambda: language_models.Trained(arguments.configuration, *kind))

    def sizes(count: int) -> tuple[int, int]:
        return (count, arguments.batch) if of == "tokens" else (arguments.seq, count)

    return lambda count: trained.step(*sizes(count), optimizer=make, **how), lambda count: trained.least(*sizes(count))


def as_json(found: dict[str, Longest], arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("config", "memory", "host_memory", "lora", "load_in_4bit", "dtype", "largest", "batch", "seq", *STEP)
    count = "tokens" if arguments.largest == "sequence" else "sequences"
    rows = {name: {count: best.tokens, "refused": best.refused, **best.profile.sizes()} for name, best in found.items()}
    asked = {name: getattr(arguments, name) for name in names if name != {"tokens": "seq", "sequences": "batch"}[count]}
    return asked | {"optimizer": options.OPTIMIZERS[arguments.optimizer], "variants": rows}


def table_text(found: dict[str, Longest], arguments: argparse.Namespace) -> str:
    """What a person reads."""
    from ckptfused.profiler.table import conditions, duration

    longest = arguments.largest == "sequence"
    trained = "all weights" if arguments.lora is None else f"LoRA of rank {arguments.lora}"
    trained += " on 4-bit weights" if arguments.load_in_4bit else ""
    of = f"{arguments.dtype}{{}}, {trained}" if arguments.configuration else "a model of your own{}"
    width, step = max(map(len, found)), next(iter(found.values())).profile
    asked = f"batch {arguments.batch}" if longest else f"sequences of {arguments.seq:,}"
    lines = [
        ", ".join(
            filter(
                None,
                (
                    arguments.config,
                    of.format(conditions(step)),
                    options.OPTIMIZERS[arguments.optimizer],
                    asked if arguments.configuration else None,
                    f"{size(arguments.memory)} of {step.device}",
                ),
            )
        ),
        "",
        f"{'':{width}}  {'longest sequence' if longest else '   largest batch'}",
    ]
    for name, best in found.items():
        step, needs = best.profile, f"{size(best.profile.peak)}, at {best.profile.moment}"
        needs += f", and {size(step.host)} of host memory" if step.host else ""
        if best.tokens:
            said = f"{best.tokens:>16,}  {duration(step.seconds)} a step; {needs}"
            said += ", all that the model takes" if best.refused else ""
        else:
            said = f"{'none':>16}  the {'shortest' if longest else 'smallest'} needs {needs}"
        lines.append(f"{name:{width}}  {said}")
    why = next((best.refused for best in found.values() if best.refused), "")
    lines += ["", f"Why no more: {why}"] if why else []
    if arguments.card.memory and arguments.memory > arguments.card.memory:
        lines += ["", f"The memory is above the {size(arguments.card.memory)} that one {step.device} has."]
    lines += ["", "Not counted: the CUDA context, workspaces of libraries, fragmentation."]
    return "\n".join(lines)
