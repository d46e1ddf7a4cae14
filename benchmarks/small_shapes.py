"""Times small shapes, whose calls cost as much as their work, beside PyTorch: short sequences, evaluation, losses.

float32 on one thread. The two variants of a case take turns, one step each; processor time counts, so that a busy
machine falls on both alike. Writes benchmarks/results/small-shapes[-<label>].json and .md.

    python benchmarks/small_shapes.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from benchmarks import environment
from benchmarks.commands import command_line, page, write
from benchmarks.host_time import summary
from ckptfused import FusedCheckpointBlock

Step = Callable[[], Any]
LAYERS = {
    "64 sequences of 5 tokens, width 64, dropout 0.1": ((64, 5, 64), 0.1, True),
    "the same without dropout": ((64, 5, 64), 0.0, True),
    "64 sequences of 5 tokens, width 256, dropout 0.1": ((64, 5, 256), 0.1, True),
    "2 sequences of 5 tokens, width 16, evaluation": ((2, 5, 16), 0.1, False),
    "64 sequences of 5 tokens, width 64, evaluation": ((64, 5, 64), 0.1, False),
}
"""A layer's input, its dropout, and whether it trains."""
LOSSES = {
    "loss of 64 rows, 10 classes, width 64": (64, 10, 64),
    "loss of 8 rows, 50,000 classes, width 64": (8, 50_000, 64),
    "loss of 8 rows, 50,000 classes, width 256": (8, 50_000, 256),
}
"""Rows, classes and width of a loss head."""


def layer_steps(shape: tuple[int, int, int], dropout: float, trains: bool) -> list[Step]:
    """The step of `nn.TransformerEncoderLayer` and of a block with its weights: forward and backward, or evaluation."""
    width = shape[-1]
    plain = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
    x, dy = torch.randn(shape, requires_grad=trains), torch.randn(shape)

    def step(layer: nn.Module) -> Step:
        def evaluation() -> Any:
            with torch.no_grad():
                return layer(x)

        return (lambda: layer(x).backward(dy)) if trains else evaluation

    fused = FusedCheckpointBlock.from_layer(plain)
    return [step(layer.train(trains)) for layer in (plain, fused)]


def loss_steps(rows: int, classes: int, width: int) -> list[Step]:
    """A training step of `F.cross_entropy(F.linear(x, weight), target)`, and of `linear_cross_entropy`."""
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))

    def step(loss: Callable[[Tensor, Tensor, Tensor], Any]) -> Step:
        return lambda: torch.autograd.grad(loss(x, weight, target), (x, weight))

    return [step(lambda x, w, t: F.cross_entropy(F.linear(x, w), t)), step(ckptfused.linear_cross_entropy)]


def measure(steps: list[Step], budget: float) -> dict[str, Any]:
    """Microseconds of processor time of the plain step and of ours, in turns, and their ratio."""
    times: list[list[float]] = [[], []]
    end = time.monotonic() + budget
    while time.monotonic() < end or len(times[0]) < 30:
        for step, found in zip(steps, times, strict=True):
            before = time.process_time_ns()
            step()
            found.append((time.process_time_ns() - before) / 1e3)
    timed = [found[len(found) // 10 :] for found in times]
    plain, ours = (summary(found) for found in timed)
    ratio = statistics.median(timed[1]) / statistics.median(timed[0])
    return {
        "plain": plain,
        "ours": ours,
        "ratio": ratio,
        "least": min(timed[1]) / min(timed[0]),
        "steps": len(timed[0]),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# Small shapes",
        "",
        "| case | plain µs | ours µs | ratio | ratio of the least |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["cases"].items():
        plain, ours = (row[which]["median"] for which in ("plain", "ours"))
        lines.append(f"| {name} | {plain:.0f} | {ours:.0f} | {row['ratio']:.2f} | {row['least']:.2f} |")
    least = min(row["steps"] for row in result["cases"].values())
    return page(lines, result, f"Medians of processor time, one thread; at least {least} steps each, in turns.")


def main() -> None:
    arguments = command_line(__doc__, budget=4.0).parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    cases = {name: layer_steps(*case) for name, case in LAYERS.items()}
    cases |= {name: loss_steps(*case) for name, case in LOSSES.items()}
    measured = {name: measure(steps, arguments.budget) for name, steps in cases.items()}
    write({"cases": measured, "environment": environment.describe()}, markdown, arguments, "small-shapes")


if __name__ == "__main__":
    main()
