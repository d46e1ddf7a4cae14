"""What the commands share: which model they are about, and what a step of it is."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptfused.cli import factories
from ckptfused.cli.configurations import MODELS, read_config
from ckptfused.cli.errors import CommandError
from ckptfused.simulate.cards import CARDS, device_name

if TYPE_CHECKING:
    from torch import nn

    from ckptfused.profiler.step import MakeOptimizer

T = TypeVar("T")
DTYPE_NAMES = ("bfloat16", "float16", "float32")
AUTOCAST = DTYPE_NAMES[:2]
CHECKPOINTING = {
    "none": "UNCONVERTED_MODEL",
    "hugging-face": "CHECKPOINTED",
    "ckptfused": "CONVERTED",
    "ckptfused-and-loss": "CHUNKED",
}
"""By option the variant's name in `cli.language_models`."""
OPTIMIZERS = {"adamw": "fused AdamW", "sgd": "SGD", "none": "no optimizer"}


def whole_package() -> Any:
    """ckptfused with all that it exports, which `python -m ckptfused` leaves out at first."""
    import ckptfused

    return ckptfused if hasattr(ckptfused, "__version__") else importlib.reload(ckptfused)


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which says nothing of why where another error is raised."""

    def read_or_say(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_say


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model: `--config`, `--lora`, `--dtype`."""
    named = f"{', '.join(MODELS)}, a config.json, its folder, or a model of the Hub's that was downloaded before"
    own = "; or module:factory, a function without arguments that returns a model, or a model and its batch"
    add = parser.add_argument
    add("--config", required=True, metavar="MODEL", help=named + own)
    add("--lora", type=positive, metavar="RANK", help="train adapters of this rank alone; default: all weights")
    add("--load-in-4bit", action="store_true", help="linear layers' weights are bitsandbytes' NF4, beside --lora")
    add("--dtype", choices=DTYPE_NAMES, default="bfloat16", help="of a configuration's weights (bfloat16)")


def add_step(parser: argparse.ArgumentParser, seq: int = 2048, checkpoint: bool = True) -> None:
    """Adds the options for a step's size and, with `checkpoint`, for who checkpoints it."""
    add = parser.add_argument
    add("--batch", type=positive, default=1, help="sequences a step (1)")
    add("--seq", type=positive, default=seq, help=f"tokens of each sequence ({seq})")
    parser.set_defaults(checkpoint="none")
    if checkpoint:
        add("--checkpoint", choices=[*CHECKPOINTING], help="who checkpoints a configuration's model (none)")


def add_training(parser: argparse.ArgumentParser) -> None:
    """How it is trained: whether forward computes in a lower precision, over how many batches gradients add up."""
    add = parser.add_argument
    add(
        "--autocast",
        choices=AUTOCAST,
        help="forward runs under torch.autocast, as by the Trainer's bf16 and fp16; --dtype float32 goes with it",
    )
    add(
        "--release",
        action="store_true",
        help="the optimizer updates each weight in backward, so that gradients are never all there: convert(release=…)",
    )
    add_accumulation(parser)


def add_accumulation(parser: argparse.ArgumentParser) -> None:
    """Over how many batches gradients add up."""
    parser.add_argument(
        "--gradient-accumulation-steps",
        type=positive,
        default=1,
        metavar="BATCHES",
        help="batches whose gradients add up before the optimizer steps; from the second on all of them are there (1)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """For which device, and with which optimizer."""
    add = parser.add_argument
    add(
        "--device",
        type=checked(device_name),
        default="h200",
        metavar="CARD",
        help=f"for which the step is predicted: {', '.join(CARDS)}, cpu, or cuda for the GPU at hand (h200)",
    )
    add(
        "--optimizer",
        choices=[*OPTIMIZERS],
        default="adamw",
        help="AdamW is fused, as Hugging Face's Trainer has it (adamw)",
    )


def add_prediction(parser: argparse.ArgumentParser, checkpoint: bool = True) -> None:
    """All that a predicted step depends on."""
    add_model(parser)
    add_step(parser, checkpoint=checkpoint)
    add_training(parser)
    add_device(parser)


def optimizer(arguments: argparse.Namespace) -> MakeOptimizer | None:
    """What makes the optimizer that was asked for."""
    import torch

    from ckptfused.profiler.step import adamw

    makers: dict[str, MakeOptimizer] = {"adamw": adamw, "sgd": torch.optim.SGD}
    return makers.get(arguments.optimizer)


def configuration(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The configuration of the model that is named; None: a function of the user's makes it. **Raises** `CommandError`
    where there is neither. PyTorch is not imported for it."""
    if factories.is_factory(arguments.config):
        _refuse_for_own(arguments)
        return None
    try:
        return read_config(arguments.config)
    except ValueError as error:
        raise CommandError(f"--config: {error}") from None


def built(make: Callable[[], T]) -> T:
    """What comes of a configuration. **Raises** `CommandError` for what a person can mend."""
    try:
        return make()
    except ModuleNotFoundError as error:
        raise CommandError(f"needs {error.name}: pip install {error.name}") from error
    except Exception as error:  # transformers' own words
        raise CommandError(f"--config: {said(error)}") from error


def said(error: Exception) -> str:
    """An error's words on one line: the first, where that ends in a colon the next, and what was noted of it since."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return "; ".join([" ".join(lines[: 2 if lines[0].endswith(":") else 1])[:400], *getattr(error, "__notes__", ())])


_MOST_TOKENS = 1 << 40
"""Tokens of which no card holds the numbers, let alone an activation."""


def ran(arguments: argparse.Namespace, run: Callable[[], T]) -> T:
    """The result of a run of the user's own code or model, which may print: on stderr, where it is not the answer.

    **Raises** `CommandError` for what it raises; where a function of the user's did, with the place.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return run()
    except (CommandError, whole_package().BudgetError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and not factories.is_factory(arguments.config):
            raise CommandError(said(error)) from error
        if not factories.is_factory(arguments.config):
            raise
        raise CommandError(f"{arguments.config}: {type(error).__name__}: {said(error)}{_where(error)}") from error


def _where(error: BaseException | None) -> str:
    """The last line of an error's, and of its causes', that is neither ckptfused's nor PyTorch's."""
    import torch

    ours, library = Path(__file__).parents[1], Path(torch.__file__).parent
    libraries = (str(ours), str(library), contextlib.__file__)
    found = ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(libraries) and Path(frame.filename).exists():
                found = f" ({Path(frame.filename).name}, line {frame.lineno})"
        error = error.__cause__
    return found


def model_and_batch(arguments: argparse.Namespace, needs_batch: bool = False) -> tuple[nn.Module, Any]:
    """A configuration's model on the meta device, with a batch of tokens; or what the user's own function returns.

    **Raises** `CommandError` where there is neither, or no batch where one is needed.
    """
    whole_package()
    if (name := getattr(arguments, "device", None)) is not None:  # "cuda" where there is none: before all the work
        from ckptfused.simulate.devices import device_named

        ran(arguments, lambda: device_named(name))
    if factories.is_factory(arguments.config):
        model, batch = ran(arguments, lambda: _own(arguments))
        if batch is None and needs_batch:
            raise CommandError(
                f"--config: expected {arguments.config} to return a model and a batch, got a model alone"
            )
        return model, batch
    if arguments.batch * arguments.seq > _MOST_TOKENS:
        raise CommandError(f"--batch and --seq: expected at most {_MOST_TOKENS:,} tokens a step")
    import torch

    from ckptfused.cli import language_models, longest_context

    variant = getattr(language_models, CHECKPOINTING[arguments.checkpoint])
    dtype = getattr(torch, arguments.dtype)
    how = (variant, dtype, arguments.lora, arguments.load_in_4bit)
    model = built(lambda: language_models.build_language_model(arguments.configuration, *how))
    return model, longest_context.token_batch(model, arguments.batch, arguments.seq)


def _refuse_for_own(arguments: argparse.Namespace) -> None:
    """**Raises** `CommandError` where a function of the user's is to make a model that others make, or is not there."""
    for name in ("lora", "load_in_4bit"):
        if getattr(arguments, name):
            option = name.replace("_", "-")
            raise CommandError(f"--{option}: for a configuration; {arguments.config} makes its model itself")
    factories.check_there(arguments.config)


def _own(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    import torch
    from torch import nn

    with factories.working_folder():
        made = factories.find(arguments.config)()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        came = f"a tuple of {len(made)}" if isinstance(made, tuple) and len(made) != 2 else type(model).__name__
        raise CommandError(f"--config: expected {arguments.config} to return a model, or (model, batch), got {came}")
    classes = getattr(getattr(model, "config", None), "vocab_size", None)
    if batch is None and isinstance(classes, int):
        ids = torch.arange(arguments.batch * arguments.seq).view(arguments.batch, arguments.seq) % classes
        batch = {"input_ids": ids, "labels": ids}
    return model, batch
