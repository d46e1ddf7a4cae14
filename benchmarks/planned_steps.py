"""Planned steps of a 12-layer Llama against policies made by hand, at five budgets of memory, on the CPU.

For each budget the plan's peak, measured by PyTorch's allocator, and its time beside that of the fastest policy made by
hand whose measured peak fits: each layer, every 2, every 4, selective FFN, selective attention, none, all with the
plan's loss. Losses are compared first; all variants take turns within one run. Writes
benchmarks/results/planned-steps-<layers>x<width>[-<label>].json and .md. Needs transformers.

    python benchmarks/planned_steps.py
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


import ckptfused
from benchmarks.commands import page
from benchmarks.llama import MIB, Sizes, batch_of, check_losses, command, make, peak_of, step_of
from benchmarks.step_time import summary, take_turns
from ckptfused import CheckpointPolicy

SHARES = (0.02, 0.25, 0.5, 0.75, 0.95)
"""Where each budget is between the least and the most that a plan needs."""


def by_hand(loss: dict[str, Any]) -> dict[str, CheckpointPolicy]:
    """What guides advise."""
    return {
        "each layer": CheckpointPolicy.uniform(**loss),
        "every 2": CheckpointPolicy.every(2, **loss),
        "every 4": CheckpointPolicy.every(4, **loss),
        "selective ffn": CheckpointPolicy.selective("ffn", **loss),
        "selective attention": CheckpointPolicy.selective("attention", **loss),
        "none": CheckpointPolicy.none(**loss),
    }


def measure(sizes: Sizes, arguments: Namespace) -> dict[str, Any]:
    """Plans, checks, measures and times."""
    batch = batch_of(sizes, arguments.seed)
    model = make(sizes, arguments.seed)
    front = ckptfused.plan(model, batch, 1 << 50, device="cpu").front
    least, most = front[0].peak, front[-1].peak
    plans = {}
    for share in SHARES:
        budget = int(least + share * (most - least))
        plans[f"{budget / MIB:,.1f} MiB"] = ckptfused.plan(model, batch, budget, device="cpu")
    policies = {f"plan for {name}": found.policy for name, found in plans.items()}
    for policy in dict.fromkeys(policies.values()):
        policies |= by_hand({"loss": policy.loss, "loss_scratch": policy.loss_scratch})
    models, peaks, losses = {}, {}, {}
    for name, policy in policies.items():
        models[name] = make(sizes, arguments.seed)
        ckptfused.convert(models[name], policy=policy)
        peaks[name] = peak_of(models[name], batch)
        losses[name] = models[name](**batch).loss.item()
    worst = check_losses(losses, "none")
    times = take_turns({name: step_of(one, batch) for name, one in models.items()}, arguments.budget)
    seconds = {name: summary(taken) for name, taken in times.items()}
    rows = []
    for name, found in plans.items():
        own = f"plan for {name}"
        fitting = [other for other in by_hand({}) if peaks[other] <= found.budget]
        best = min(fitting, key=lambda other: seconds[other]["median"], default=None)
        rows.append(
            {
                "budget": found.budget,
                "predicted": found.peak,
                "measured": peaks[own],
                "policy": str(found.policy),
                "predicted_seconds": found.seconds,
                "seconds": seconds[own],
                "best_by_hand": best,
                "by_hand_seconds": None if best is None else seconds[best],
            }
        )
    hand = {name: {"peak": peaks[name], "seconds": seconds[name]} for name in by_hand({})}
    return {"sizes": asdict(sizes), "rows": rows, "by_hand": hand, "largest_loss_difference": worst}


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sizes = result["sizes"]
    lines = [
        f"# Planned steps of a Llama with {sizes['layers']} layers, {sizes['width']} wide",
        "",
        f"Float32, {sizes['batch']} × {sizes['tokens']} tokens, forward and backward; MiB at the peak, seconds a step.",
        "",
        "| budget | predicted | measured | of the budget | plan, s | best by hand that fits | s | plan over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        amounts = " | ".join(f"{row[name] / MIB:,.2f}" for name in ("budget", "predicted", "measured"))
        own, other = row["seconds"]["median"], row["by_hand_seconds"]
        beside = "none fits | – | –" if other is None else f"{row['best_by_hand']} | {other['median']:.3f} | "
        beside += "" if other is None else f"{own / other['median']:.3f}"
        lines.append(f"| {amounts} | {row['measured'] / row['budget']:.1%} | {own:.3f} | {beside} |")
    lines += ["", "| by hand | peak | s |", "|---|---|---|"]
    for name, found in result["by_hand"].items():
        lines.append(f"| {name} | {found['peak'] / MIB:,.2f} | {found['seconds']['median']:.3f} |")
    lines += ["", *(f"- {row['budget'] / MIB:,.1f} MiB: {row['policy']}" for row in result["rows"])]
    return page(lines, result)


def main() -> None:
    command(__doc__, 240, "planned-steps", measure, markdown)


if __name__ == "__main__":
    main()
