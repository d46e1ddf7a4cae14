"""A predicted step against a measured one on this CPU, for eight kinds of models: bytes saved, peak, time.

Each model is predicted on meta tensors and runs here, at two widths, in float32, with AdamW. Then six ways of training
each of four of them take turns, and their order by predicted time is compared with that by measured time: two ways are
told apart where the medians differ by more than half of both spreads (20th to 80th percentile) together. Bytes do not
depend on the machine's load, times do: run it on quiet cores. Writes benchmarks/results/profile-error.json and .md.
Needs transformers, peft and scipy.

    python benchmarks/profile_error.py --label sapphirerapids
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks import environment
from benchmarks.commands import command_line, page, write
from benchmarks.profiled_models import Made, models
from benchmarks.step_time import summary, take_turns
from ckptfused import convert, profile
from ckptfused.profiler import Profile
from ckptfused.profiler.step import loss_of, model_output

WIDTHS = (256, 512)
WAYS = ("plain", "checkpointed", "inputs", "mid", "attention", "all")
ORDERED = ("llama", "llama-lora", "bert", "gpt2")
"""Whose ways are put into order, 512 wide. BERT and GPT-2 have dropout, of attention's probabilities too."""


def compared(model: nn.Module, batch: Any) -> tuple[Profile, Profile]:
    """Predicted and measured, with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return profile(model, batch, optimizer, "cpu"), profile(model, batch, optimizer)


def row(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Both, and how far the first is off."""
    predicted, measured = compared(model, batch)
    found: dict[str, Any] = {"moment": measured.moment}
    for name in ("saved", "peak", "above_state", "forward_seconds", "backward_seconds", "seconds"):
        ours, theirs = getattr(predicted, name), getattr(measured, name)
        found[name] = {"predicted": ours, "measured": theirs, "error": ours / theirs - 1}
    return found


def way(name: str, make: Callable[[], Made]) -> Made:
    """A model as one of `WAYS` trains it."""
    model, batch = make()
    if name == "checkpointed":
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()  # type: ignore[operator]
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    elif name != "plain":
        convert(model, name)
    return model, batch


def timed_ways(make: Callable[[], Made], seconds: float) -> dict[str, dict[str, float]]:
    """Predicted, and measured in turns for so many seconds: a step of each of `WAYS`."""
    predicted: dict[str, float] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name in WAYS:
        model, batch = way(name, make)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        predicted[name] = profile(model, batch, optimizer, "cpu").seconds

        def step(model: nn.Module = model, batch: Any = batch, optimizer: Any = optimizer) -> None:
            loss_of(model_output(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    taken = take_turns(steps, seconds)
    return {name: {"predicted": predicted[name], **summary(taken[name])} for name in WAYS}


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


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# Predicted steps against measured ones",
        "",
        "Float32, AdamW, batches of 2 × 128 tokens or 4 × 3 × 64 × 64 pixels (ResNet-18: 8); error of the prediction. "
        "Measured: the median of three steps, the allocator's events of another.",
        "",
        "| model | width | saved, MiB | error | peak, MiB | error | step, ms | error | forward | backward |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for width, rows in result["models"].items():
        for name, found in rows.items():
            sizes = " | ".join(
                f"{found[part]['measured'] / 2**20:,.2f} | {found[part]['error']:+.2%}" for part in ("saved", "peak")
            )
            times = [f"{found[f'{part}seconds']['error']:+.0%}" for part in ("", "forward_", "backward_")]
            step = f"{found['seconds']['measured'] * 1e3:,.1f}"
            lines.append(f"| {name} | {width} | {sizes} | {step} | {' | '.join(times)} |")
    for name, ways in result["ways"].items():
        lines += ["", *_order_lines(name, ways)]
    return page(lines, result)


def _order_lines(name: str, ways: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        f"| {name}, 512 wide | step, ms | 20th to 80th percentile | rank | predicted, ms | of the measured | rank |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    ranks = [sorted(ways, key=lambda one: ways[one][kind]) for kind in ("median", "predicted")]
    for one, found in ways.items():
        times = [f"{found[part] * 1e3:,.1f}" for part in ("median", "p20", "p80", "predicted")]
        places = [ranked.index(one) + 1 for ranked in ranks]
        share = f"{found['predicted'] / found['median']:.2f}"
        lines.append(
            f"| {one} | {times[0]} | {times[1]} – {times[2]} | {places[0]} | {times[3]} | {share} | {places[1]} |"
        )
    agreed = order(ways)
    said = ", ".join(f"{fast} before {slow}" for fast, slow in agreed["wrong"]) or "none"
    pairs = len(WAYS) * (len(WAYS) - 1) // 2
    return [
        *lines,
        "",
        f"Kendall's tau {agreed['tau']:.2f}. Of {pairs} pairs {agreed['apart']} are told apart by measured time; "
        f"predicted the other way round: {said}.",
    ]


def main() -> None:
    parser = command_line(__doc__, budget=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for width in WIDTHS:
        found[str(width)] = {}
        for name, make in models(width // 64).items():
            print(name, width, flush=True)
            torch.manual_seed(arguments.seed)
            found[str(width)][name] = row(*make())
    ways = {}
    for name in ORDERED:
        print(name, "in", len(WAYS), "ways", flush=True)
        torch.manual_seed(arguments.seed)
        ways[name] = timed_ways(models(8)[name], arguments.budget)
    result = {"models": found, "ways": ways, "environment": environment.describe()}
    write(result, markdown, arguments, "profile-error")


if __name__ == "__main__":
    main()
