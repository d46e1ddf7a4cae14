"""Time and peak memory of a loss head, forward and backward: plain, PyTorch's chunked one, and ckptfused's two keeps.

Gradients are checked first; variants take turns within one run. The three products alone, which no exact loss can do
without, are the floor. Writes benchmarks/results/loss-head-<tokens>x<width>-<vocabulary>-<dtype>[-<label>].json, .md.
Needs torch 2.13.

    python benchmarks/loss_head.py --vocabulary 32768 --vocabulary 128256 --dtype float32 --dtype bfloat16
    python benchmarks/loss_head.py --vocabulary 32768 --variant "linear, cross_entropy" --variant ckptfused --budget 10
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused
from benchmarks import environment
from benchmarks.checks import worst_error
from benchmarks.commands import command_line, interleaved, page, times, write
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns

TOKENS, WIDTH = 2048, 1024
CHECKED_TOKENS, CHECKED_CLASSES = 96, 4096
PLAIN, CHUNKED, PRODUCTS = "linear, cross_entropy", "F.linear_cross_entropy", "three products"
GRADIENTS, INPUTS = "ckptfused", 'ckptfused, keep="inputs"'
GOALS = {PLAIN: 0.8, CHUNKED: 0.9}  # of their time
RATIOS = (*GOALS, PRODUCTS)


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss as language models make it, with a float32 copy of the logits."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def chunked(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """PyTorch's, with its defaults."""
    call: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
    return call(x, weight, target, options=torch.nn.LinearCrossEntropyOptions())  # type: ignore[attr-defined]


class Products(torch.autograd.Function):
    """The products of a plain step and nothing else: the logits stand for their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, F.linear(x, weight))
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, dlogits = ctx.saved_tensors
        return dlogits @ weight, dlogits.t() @ x


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    PLAIN: plain,
    PRODUCTS: lambda x, weight, target: Products.apply(x, weight),
    CHUNKED: chunked,
    GRADIENTS: ckptfused.linear_cross_entropy,
    INPUTS: partial(ckptfused.linear_cross_entropy, keep="inputs"),
}


def inputs(tokens: int, classes: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as a model's last norm gives it, a weight as it is drawn, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(classes, WIDTH, generator=generator)).to(dtype).requires_grad_()
    return x, weight, torch.randint(classes, (tokens,), generator=generator)


def step(variant: str, x: Tensor, weight: Tensor, target: Tensor) -> None:
    x.grad = weight.grad = None
    VARIANTS[variant](x, weight, target).backward()


def check(dtype: torch.dtype, seed: int) -> str:
    """Raises unless ckptfused's gradients are right, as `checks.worst_error`; returns what was shown."""

    def found(variant: str, *arguments: Tensor) -> dict[str, Tensor]:
        step(variant, *arguments)
        return {"x": arguments[0].grad, "weight": arguments[1].grad}  # type: ignore[dict-item]

    x, weight, target = inputs(CHECKED_TOKENS, CHECKED_CLASSES, dtype, seed)
    exact = found(PLAIN, *(t.detach().double().requires_grad_() for t in (x, weight)), target)
    own = found(PLAIN, x, weight, target)
    worst = max(worst_error(exact, own, found(variant, x, weight, target), dtype) for variant in (GRADIENTS, INPUTS))
    return f"gradients of x and weight at most {worst:.2f} of the allowed error against float64"


def measure(vocabulary: int, dtype_name: str, variants: list[str], budget: float, seed: int) -> dict[str, Any]:
    """Checks, then measures memory and time."""
    dtype = getattr(torch, dtype_name)
    checked = check(dtype, seed)
    arguments = inputs(TOKENS, vocabulary, dtype, seed)
    steps = {variant: partial(step, variant, *arguments) for variant in VARIANTS if variant in variants}
    peaks = {}
    for variant, call in steps.items():
        arguments[0].grad = arguments[1].grad = None
        peaks[variant] = memory_of(call).peak
    times = {variant: summary(seconds) for variant, seconds in take_turns(steps, budget).items()}
    return {
        "case": f"loss-head-{TOKENS}x{WIDTH}-{vocabulary}",
        "dtype": dtype_name,
        "check": checked,
        "seconds": times,
        "peak_bytes": peaks,
        "over": {name: times[GRADIENTS]["median"] / times[name]["median"] for name in RATIOS if name in times},
        "goals": GOALS,
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        f"# {result['case']}, {result['dtype']}",
        "",
        "Forward and backward, gradients of x and weight.",
        "",
        "| variant | median s | p20 | p80 | peak MiB, gradients included | ckptfused takes | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, row in result["seconds"].items():
        over, goal = result["over"].get(variant), result["goals"].get(variant)
        lines.append(
            f"| `{variant}` | {times(row)} | {result['peak_bytes'][variant] / 2**20:,.0f} | "
            f"{f'{over:.2f}×' if over else ''} | {f'≤ {goal:.2f}×' if goal else ''} |"
        )
    return page(lines, result, f"{interleaved(result)} Checked first: {result['check']}.")


def main() -> None:
    parser = command_line(__doc__, 60.0)
    parser.add_argument("--vocabulary", type=int, action="append", help="default: 32768 and 128256")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help=f"beside {GRADIENTS}; default: all")
    arguments = parser.parse_args()
    variants = [GRADIENTS, *arguments.variant] if arguments.variant else list(VARIANTS)
    torch.set_num_threads(arguments.threads)
    for vocabulary in arguments.vocabulary or (32768, 128256):
        for dtype in arguments.dtype or ("float32", "bfloat16"):
            result = measure(vocabulary, dtype, variants, arguments.budget, arguments.seed)
            write(result, markdown, arguments, result["case"], dtype)


if __name__ == "__main__":
    main()
