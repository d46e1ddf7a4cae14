"""A predicted step against a measured one on this CPU, for eight kinds of models: bytes saved, peak, time.

Each model is predicted on meta tensors and runs here, at two widths, in float32, with AdamW. Bytes do not depend on the
machine's load, times do: run it on quiet cores. Needs transformers and peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.benchmark import Benchmark, Column, Rows, Sizes, mib, number, option
from benchmarks.profiled_models import models
from ckptfused import profile
from ckptfused.profiler import Profile

FIGURES = ("saved", "peak", "above_state", "forward_seconds", "backward_seconds", "seconds")


@dataclass(frozen=True, kw_only=True)
class WidthSizes(Sizes):
    """The models' width."""

    width: int = option(256, 512)


def compared(model: nn.Module, batch: Any) -> tuple[Profile, Profile]:
    """Predicted and measured, with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return profile(model, batch, optimizer, "cpu"), profile(model, batch, optimizer)


def figures(sizes: WidthSizes, steps: Any) -> Rows:
    """What was measured of each model, and what was predicted."""
    found: Rows = {}
    for name, make in models(sizes.width // 64).items():
        torch.manual_seed(sizes.seed)
        predicted, measured = compared(*make())
        found[name] = {figure: getattr(measured, figure) for figure in ("moment", *FIGURES)}
        found[name] |= {f"{figure}_predicted": getattr(predicted, figure) for figure in FIGURES}
    return found


def error(title: str, figure: str, form: str) -> Column:
    """How far a prediction is off."""
    return Column(title, lambda row, rows: format(row[f"{figure}_predicted"] / row[figure] - 1, form))


BENCHMARK = Benchmark(
    name="profile-error",
    doc=__doc__,
    sizes=WidthSizes(),
    figures=figures,
    columns=(
        mib("saved", "saved", ",.2f"),
        error("error", "saved", "+.2%"),
        mib("peak", "peak", ",.2f"),
        error("error", "peak", "+.2%"),
        number("step, ms", "seconds", ",.1f", 1e-3),
        error("error", "seconds", "+.0%"),
        error("forward", "forward_seconds", "+.0%"),
        error("backward", "backward_seconds", "+.0%"),
    ),
    case=lambda sizes: f"{sizes.width} wide",
    shape=lambda sizes, rows: (
        "Float32, AdamW, batches of 2 × 128 tokens or 4 × 3 × 64 × 64 pixels (ResNet-18: 8); error of the prediction. "
        "Measured: the median of three steps, the allocator's events of another."
    ),
)
