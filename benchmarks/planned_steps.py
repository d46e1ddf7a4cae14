"""Planned steps of a 12-layer Llama against policies made by hand, at five budgets of memory, on the CPU.

For each budget the plan's peak, measured by PyTorch's allocator, and its time beside that of the fastest policy made by
hand whose measured peak fits: each layer, every 2, every 4, selective FFN, selective attention, none, all with the
plan's loss. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import ckptfused
from benchmarks.benchmark import MIB, Benchmark, Column, Rows, Steps, mib
from benchmarks.llama import LlamaSizes, LlamaStep, batch_of, described, make, same_losses
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


def variants(sizes: LlamaSizes) -> Steps:
    """A step of each plan, and one of each policy made by hand."""
    batch, model = batch_of(sizes), make(sizes)
    front = ckptfused.plan(model, batch, 1 << 50, device="cpu").front
    least, most = front[0].peak, front[-1].peak
    budgets = [int(least + share * (most - least)) for share in SHARES]
    plans = {f"plan for {b / MIB:,.1f} MiB": ckptfused.plan(model, batch, b, device="cpu") for b in budgets}
    policies = {name: found.policy for name, found in plans.items()}
    for policy in dict.fromkeys(policies.values()):
        policies |= by_hand({"loss": policy.loss, "loss_scratch": policy.loss_scratch})
    steps = {name: LlamaStep(make(sizes), batch, plans.get(name)) for name in policies}
    for name, step in steps.items():
        ckptfused.convert(step.model, policy=policies[name])
    return steps


def figures(sizes: LlamaSizes, steps: Any) -> Rows:
    """Peaks, and what each plan says of itself."""
    found: Rows = {name: {"peak": step.peak()} for name, step in steps.items()}
    for name, step in steps.items():
        if (plan := step.plan) is not None:
            said = {"predicted": plan.peak, "predicted_seconds": plan.seconds, "policy": str(plan.policy)}
            found[name] |= {"budget": plan.budget, **said}
    return found


def best_by_hand(budget: int, rows: Rows) -> str | None:
    """The fastest of the policies made by hand whose measured peak fits."""
    fitting = [name for name in by_hand({}) if name in rows and rows[name]["peak"] <= budget]
    return min(fitting, key=lambda name: rows[name]["median"], default=None)


def _beside(row: dict[str, Any], rows: Rows) -> str:
    if "budget" not in row:
        return ""
    best = best_by_hand(row["budget"], rows)
    return "none fits" if best is None else f"{best}, {row['median'] / rows[best]['median']:.3f}× its time"


BENCHMARK = Benchmark(
    name="planned-steps",
    doc=__doc__,
    sizes=LlamaSizes(),
    variants=variants,
    check=lambda sizes, steps: same_losses(steps, "none"),
    figures=figures,
    columns=(
        mib("budget", "budget", ",.2f"),
        mib("predicted", "predicted", ",.2f"),
        mib("measured", "peak", ",.2f"),
        Column("of the budget", lambda row, rows: f"{row['peak'] / row['budget']:.1%}" if "budget" in row else ""),
        Column("best by hand that fits", _beside),
    ),
    stem=lambda sizes: f"planned-steps-{sizes.layers}x{sizes.width}",
    shape=lambda sizes, rows: described(sizes, "forward and backward; MiB at the peak"),
    said=lambda sizes, rows: [f"{name}: {row['policy']}." for name, row in rows.items() if "policy" in row],
    budget=240.0,
)
