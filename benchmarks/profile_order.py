"""Six ways of training each of four models, in order by predicted time and by measured time on this CPU.

Two ways are told apart where the medians differ by more than half of both spreads (20th to 80th percentile) together.
Times depend on the machine's load: run it on quiet cores. Needs transformers, peft and scipy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.benchmark import WALL, Benchmark, Column, Rows, Sizes, Steps, number, option
from benchmarks.profiled_models import Made, models
from ckptfused import convert, profile
from ckptfused.profiler.step import loss_of, model_output

WAYS = ("plain", "checkpointed", "inputs", "mid", "attention", "all")


@dataclass(frozen=True, kw_only=True)
class OrderSizes(Sizes):
    """A model, 512 wide. BERT and GPT-2 have dropout, of attention's probabilities too."""

    model: str = option("llama", "llama-lora", "bert", "gpt2")


def way(name: str, made: Made) -> Made:
    """A model as one of `WAYS` trains it."""
    model, batch = made
    if name == "checkpointed":
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()  # type: ignore[operator]
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    elif name != "plain":
        convert(model, name)
    return model, batch


class Trained:
    """A step of a model with AdamW."""

    def __init__(self, model: Any, batch: Any) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def predicted(self) -> float:
        """Seconds."""
        return profile(self.model, self.batch, self.optimizer, "cpu").seconds

    def __call__(self) -> None:
        loss_of(model_output(self.model, self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def variants(sizes: OrderSizes) -> Steps:
    return {name: Trained(*way(name, models(8)[sizes.model]())) for name in WAYS}


def figures(sizes: OrderSizes, steps: Any) -> Rows:
    return {name: {"predicted": step.predicted()} for name, step in steps.items()}


def order(ways: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """How two orders agree: Kendall's tau of all ways; pairs whose measured times are told apart, and those of them
    that are predicted the other way round."""
    from scipy.stats import kendalltau

    tau = kendalltau(*([found[kind] for found in ways.values()] for kind in ("predicted", "median"))).statistic
    apart = []
    for a, b in itertools.combinations(ways, 2):
        slow, fast = sorted((a, b), key=lambda name: -ways[name]["median"])
        noise = sum(ways[name]["p80"] - ways[name]["p20"] for name in (a, b)) / 2
        if ways[slow]["median"] - ways[fast]["median"] > noise:
            apart.append((fast, slow))
    wrong = [(fast, slow) for fast, slow in apart if ways[fast]["predicted"] >= ways[slow]["predicted"]]
    return {"tau": float(tau), "apart": len(apart), "wrong": wrong}


def place(title: str, figure: str) -> Column:
    """A variant's place in the order by a figure."""
    return Column(title, lambda row, rows: str(1 + sum(other[figure] < row[figure] for other in rows.values())))


def said(sizes: OrderSizes, rows: Rows) -> list[str]:
    """How the two orders agree."""
    agreed, pairs = order(rows), len(rows) * (len(rows) - 1) // 2
    wrong = ", ".join(f"{fast} before {slow}" for fast, slow in agreed["wrong"]) or "none"
    return [
        f"Kendall's tau {agreed['tau']:.2f}. Of {pairs} pairs {agreed['apart']} are told apart by measured time; "
        f"predicted the other way round: {wrong}."
    ]


BENCHMARK = Benchmark(
    name="profile-order",
    doc=__doc__,
    sizes=OrderSizes(),
    variants=variants,
    figures=figures,
    columns=(
        place("rank", "median"),
        number("predicted, s", "predicted", ".4f"),
        Column("of the measured", lambda row, rows: f"{row['predicted'] / row['median']:.2f}"),
        place("rank", "predicted"),
    ),
    case=lambda sizes: f"{sizes.model}, 512 wide",
    said=said,
    budget=40.0,
    clock=replace(WALL, form=".4f"),
)
