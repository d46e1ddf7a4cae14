"""Time the FFN's kernels on the GPU at hand, and have blocks use the fastest from then on.

Measured are cuBLAS and each tile of the Triton kernels, for one shape: `ckptfused.explain` says which shapes a block
would ask for. The result is kept among the user's caches, by device and versions of PyTorch and Triton.
"""

from __future__ import annotations

import argparse
from typing import Any

from ckptfused.cli.errors import CommandError
from ckptfused.cli.options import AUTOCAST, positive, whole_package
from ckptfused.spec.activations import ACTIVATIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=positive, required=True, help="tokens of a step: batch times sequence length")
    add("--width", type=positive, required=True, help="the model's width")
    add("--hidden", type=positive, required=True, help="the FFN's hidden width")
    add("--activation", choices=[*ACTIVATIONS], default="swiglu", help="of the FFN (swiglu)")
    add("--dtype", choices=AUTOCAST, default="bfloat16", help="in which it computes (bfloat16)")
    add("--rounds", type=positive, default=21, help="of which the median counts (21)")


def run(arguments: argparse.Namespace) -> int:
    whole_package()
    import torch

    from ckptfused.triton import tune, tuning

    sizes, dtype = (arguments.rows, arguments.width, arguments.hidden), getattr(torch, arguments.dtype)
    if arguments.width % 16 or arguments.hidden % 16:
        raise CommandError(f"--width and --hidden: expected multiples of 16, got {sizes[1]} and {sizes[2]}")
    try:
        entry = tune.tune_ffn(*sizes, arguments.activation, dtype, arguments.rounds)
    except (RuntimeError, ImportError) as error:
        raise CommandError(str(error)) from error
    print(table_text(entry))
    print(f"chosen: {entry['choice']}, from the next process on. Kept in {tuning.cache_file()}")
    return 0


def table_text(entry: dict[str, Any]) -> str:
    """Milliseconds of each kernel on each path of a block, as text."""
    kernels: dict[str, dict[str, float]] = entry["all_ms"]
    paths = list(next(iter(kernels.values())))
    rows = [["milliseconds", *paths], *([name, *(f"{ms:.3f}" for ms in kernels[name].values())] for name in kernels)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
