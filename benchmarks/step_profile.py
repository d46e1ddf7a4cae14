"""Where the time of a training step goes: each variant of step_time.py under the profiler, by kind of work.

python benchmarks/step_profile.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES, LLAMA
from benchmarks.step_time import make_stacks, step
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


def parts(variant: Variant, case_name: str, dtype: torch.dtype) -> dict[str, float]:
    """Seconds a step of each part: time of an operator without that of the operators it calls."""
    stacks, x, dy = make_stacks(CASES[case_name], dtype, seed=0, variants=(variant,))
    step(stacks[variant], x, dy)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            step(stacks[variant], x, dy)
    seconds: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        seconds[part_of(event.key)] += event.self_cpu_time_total / 1e6 / STEPS
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), default=LLAMA.name)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both")
    arguments = parser.parse_args()
    for dtype in arguments.dtype or ("float32", "bfloat16"):
        print(f"{arguments.case}, {dtype}: seconds a step, mean of {STEPS}")
        for variant in VARIANTS:
            found = parts(variant, arguments.case, getattr(torch, dtype))
            shares = "  ".join(f"{part} {found[part]:.3f}" for part in (*PARTS, "other"))
            print(f"  {variant:24}{shares}  sum {sum(found.values()):.3f}", flush=True)


if __name__ == "__main__":
    main()
