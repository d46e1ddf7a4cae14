"""Small shapes, whose calls cost as much as their work, beside PyTorch: short sequences, evaluation, losses.

float32 on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from benchmarks.benchmark import PROCESSOR, Benchmark, Sizes, Step, Steps, number, option, ratio
from ckptfused import FusedCheckpointBlock

PLAIN, OURS = "plain", "ours"
COLUMNS = (ratio("ratio", PLAIN), number("ratio of the least", "least_ratio", ".2f"))
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


def layer_steps(shape: tuple[int, int, int], dropout: float, trains: bool) -> Steps:
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
    return {PLAIN: step(plain.train(trains)), OURS: step(fused.train(trains))}


def loss_steps(rows: int, classes: int, width: int) -> Steps:
    """A training step of `F.cross_entropy(F.linear(x, weight), target)`, and of `linear_cross_entropy`."""
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))

    def step(loss: Callable[[Tensor, Tensor, Tensor], Any]) -> Step:
        return lambda: torch.autograd.grad(loss(x, weight, target), (x, weight))

    plain = step(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    return {PLAIN: plain, OURS: step(ckptfused.linear_cross_entropy)}


@dataclass(frozen=True, kw_only=True)
class ShapeSizes(Sizes):
    """One of the layers and losses above."""

    case: str = option(*LAYERS, *LOSSES)


def variants(sizes: ShapeSizes) -> Steps:
    return layer_steps(*LAYERS[sizes.case]) if sizes.case in LAYERS else loss_steps(*LOSSES[sizes.case])


BENCHMARK = Benchmark(
    name="small-shapes",
    doc=__doc__,
    sizes=ShapeSizes(),
    variants=variants,
    columns=COLUMNS,
    case=lambda sizes: sizes.case,
    shape=lambda sizes, rows: "float32, processor time, one thread.",
    budget=4.0,
    clock=PROCESSOR,
    threads=1,
)
