"""Train a small byte-level decoder on real text four ways and compare memory, time and loss.

The variants are plain PyTorch layers, the same under torch.utils.checkpoint, ckptfused keeping everything, and
ckptfused saving only each layer's input. Fails if the two ckptfused curves differ at all or if, without dropout, they
leave the plain curve by more than rounding explains.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from ckptfused.cli.errors import CommandError
from ckptfused.cli.options import whole_package
from ckptfused.sizes import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, help="a text file; default: the Python standard library's own source")
    add("--steps", type=int, default=700)
    add("--batch", type=int, default=16, help="sequences a step")
    add("--tokens", type=int, default=64, help="bytes in a sequence")
    add("--d-model", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, help="default: as many as heads")
    add("--hidden", type=int, default=352, help="width of the SwiGLU layers")
    add("--layers", type=int, default=3)
    add("--dropout", type=float, default=0.0, help="on both residual branches; then only the ckptfused curves compare")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--learning-rate", type=float, default=3e-3, help="at its highest")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    add("--device", choices=("cpu", "cuda"), help="default: the GPU, where there is one that ckptfused was built for")
    add("--out", type=Path, default=Path("demo"), help="folder for demo.png and demo.json")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    whole_package()
    from ckptfused.cli.demo import command

    return command.run(arguments)


def check(arguments: argparse.Namespace) -> None:
    for name in ("steps", "batch", "tokens", "d_model", "heads", "hidden", "layers", "threads"):
        if getattr(arguments, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(arguments, name)}")
    if not 0 <= arguments.dropout < 1:
        raise CommandError(f"--dropout: expected a probability in [0, 1), got {arguments.dropout}")
    if not 0 < arguments.learning_rate < math.inf:
        raise CommandError(f"--learning-rate: expected a finite number above 0, got {arguments.learning_rate}")
    if arguments.d_model % (2 * arguments.heads):
        raise CommandError(
            f"--d-model: expected a multiple of twice the heads ({2 * arguments.heads}), got {arguments.d_model}"
        )
    if arguments.kv_heads is not None and (arguments.kv_heads < 1 or arguments.heads % arguments.kv_heads):
        raise CommandError(
            f"--kv-heads: expected a divisor of {counted(arguments.heads, 'head')}, got {arguments.kv_heads}"
        )
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out: expected a folder that can be written, got {arguments.out} ({error})") from error
