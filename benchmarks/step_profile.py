"""Where the time of a training step goes: each variant of step_time.py under the profiler, by kind of work."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.benchmark import Benchmark, number
from benchmarks.cases import CASES
from benchmarks.step_time import StackSizes, make_stacks, shape, step
from ckptfused.cli.models import VARIANTS, Variant

STEPS = 3
# Parts of a step and the names of the operators that are theirs; what matches none is memory traffic.
PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("attention_fwd", "attention_bwd", "flash_attention", "scaled_dot_product"),
}


def part_of(operator: str) -> str:
    """The part of the step that an operator's own time belongs to."""
    return next((part for part, names in PARTS.items() if any(name in operator for name in names)), "other")


def parts(variant: Variant, sizes: StackSizes) -> dict[str, float]:
    """Seconds a step of each part: time of an operator without that of the operators it calls."""
    stacks, x, dy = make_stacks(CASES[sizes.case], getattr(torch, sizes.dtype), sizes.seed, (variant,))
    step(stacks[variant], x, dy)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            step(stacks[variant], x, dy)
    seconds: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        seconds[part_of(event.key)] += event.self_cpu_time_total / 1e6 / STEPS
    return {part: seconds[part] for part in (*PARTS, "other")} | {"sum": sum(seconds.values())}


BENCHMARK = Benchmark(
    name="step-profile",
    doc=__doc__,
    sizes=StackSizes(),
    figures=lambda sizes, steps: {variant: parts(variant, sizes) for variant in VARIANTS},
    columns=[number(f"{part}, s", part, ".3f") for part in (*PARTS, "other", "sum")],
    stem=lambda sizes: f"step-profile-{sizes.case}-{sizes.dtype}",
    shape=lambda sizes, rows: f"{shape(sizes, rows)} Seconds a step, mean of {STEPS}.",
)
