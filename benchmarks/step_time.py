"""Times a training step (forward and backward) of a stack of Llama-style layers in four variants.

Gradients are checked first; no time is reported after a failed check. Variants take turns within one run, so that a
slow minute of the machine falls on all of them. Writes benchmarks/results/<case>-<dtype>[-<label>].json and .md.

    python benchmarks/step_time.py --dtype float32 --dtype bfloat16
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.cases import CASES, GOALS, LLAMA, Case
from benchmarks.checks import check_gradients
from benchmarks.commands import command_line, interleaved, page, write
from ckptfused.cli.models import VARIANTS, Variant, plain_layers, variant_layers


def step(layers: nn.ModuleList, x: Tensor, dy: Tensor) -> None:
    """One forward and backward; gradients are freed, as zero_grad() does by default."""
    layers.zero_grad(set_to_none=True)
    x.grad = None
    y = x
    for layer in layers:
        y = layer(y)
    y.backward(dy)


def take_turns(variants: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """Seconds of each call; one untimed round, then rounds of all variants until the budget is spent (at least 3)."""
    for call in variants.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names, start = list(variants), time.perf_counter()
    while len(seconds[names[0]]) < 3 or time.perf_counter() - start < budget:
        for name in names:
            before = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - before)
        names.append(names.pop(0))  # no variant always follows the same other one
    return seconds


def time_variants(stacks: dict[str, nn.ModuleList], x: Tensor, dy: Tensor, budget: float) -> dict[str, list[float]]:
    """Seconds of each variant's steps, as `take_turns`."""
    return take_turns({name: partial(step, layers, x, dy) for name, layers in stacks.items()}, budget)


def make_stacks(
    case: Case, dtype: torch.dtype, seed: int, variants: Iterable[Variant] = VARIANTS
) -> tuple[dict[str, nn.ModuleList], Tensor, Tensor]:
    """The layers of each variant, with equal weights; an input; and the gradient that comes back."""
    plain = plain_layers(case.shape, dtype=dtype, seed=seed)
    stacks: dict[str, nn.ModuleList] = {name: variant_layers(name, plain, case.shape) for name in variants}
    generator = torch.Generator().manual_seed(seed)
    size = (case.batch, case.tokens, case.shape.d_model)
    x = torch.randn(size, generator=generator).to(dtype).requires_grad_()
    return stacks, x, torch.randn(size, generator=generator).to(dtype)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentiles."""
    if len(seconds) < 2:
        return {"median": seconds[0], "p20": seconds[0], "p80": seconds[0], "steps": len(seconds)}
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {"median": statistics.median(seconds), "p20": fifths[0], "p80": fifths[3], "steps": len(seconds)}


def measure(case: Case, dtype_name: str, budget: float, seed: int) -> dict[str, Any]:
    """Checks, then times, one case in one dtype."""
    dtype = getattr(torch, dtype_name)
    checks = check_gradients(case, dtype, seed)
    stacks, x, dy = make_stacks(case, dtype, seed)
    times = {name: summary(seconds) for name, seconds in time_variants(stacks, x, dy, budget).items()}
    ours = times["ckptfused inputs"]["median"]
    goals = GOALS[dtype_name] if case is LLAMA else {}
    return {
        "case": case.name,
        "dtype": dtype_name,
        "batch": case.batch,
        "tokens": case.tokens,
        "shape": vars(case.shape),
        "checks": checks,
        "seconds": times,
        "inputs_over": {name: ours / times[name]["median"] for name in times if name != "ckptfused inputs"},
        "goals": goals,
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        f"# {result['case']}, {result['dtype']}",
        "",
        f"{result['shape']['layers']} layers, C {result['shape']['d_model']}, F {result['shape']['dim_feedforward']}, "
        f"{result['shape']['nhead']} heads, {result['batch']} × {result['tokens']} tokens, "
        f"residual dropout {result['shape']['residual_dropout']}; forward and backward.",
        "",
        "| variant | median s | p20 | p80 | ckptfused inputs takes | goal |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["seconds"].items():
        ratio = result["inputs_over"].get(name)
        goal = result["goals"].get(name)
        lines.append(
            f"| {name} | {row['median']:.3f} | {row['p20']:.3f} | {row['p80']:.3f} | "
            f"{f'{ratio:.2f}×' if ratio else ''} | {f'≤ {goal:.2f}×' if goal else ''} |"
        )
    return page(lines, result, f"{interleaved(result)} Gradients checked first: {'; '.join(result['checks'])}.")


def main() -> None:
    parser = command_line(__doc__, 90.0)
    parser.add_argument("--case", choices=sorted(CASES), default=LLAMA.name)
    parser.add_argument("--dtype", choices=sorted(GOALS), action="append", help="default: both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in arguments.dtype or sorted(GOALS, reverse=True):
        result = measure(CASES[arguments.case], dtype, arguments.budget, arguments.seed)
        write(result, markdown, arguments, arguments.case, dtype)


if __name__ == "__main__":
    main()
