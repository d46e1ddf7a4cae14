"""Time and peak memory of a loss head, forward and backward: plain, PyTorch's chunked one, and ckptfused's two keeps.

The three products alone, which no exact loss can do without, are the floor. Needs torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused
from benchmarks.benchmark import Benchmark, Goal, Sizes, Steps, mib, option, ratio
from benchmarks.checks import worst_error
from benchmarks.memory import memory_of

CHECKED_TOKENS, CHECKED_CLASSES = 96, 4096
PLAIN, CHUNKED, PRODUCTS = "linear, cross_entropy", "F.linear_cross_entropy", "three products"
GRADIENTS, INPUTS = "ckptfused", 'ckptfused, keep="inputs"'


@dataclass(frozen=True, kw_only=True)
class HeadSizes(Sizes):
    """The input of a loss head and its weight."""

    tokens: int = 2048
    width: int = 1024
    vocabulary: int = option(32768, 128256)
    dtype: str = option("float32", "bfloat16")


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


def inputs(sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """x as a model's last norm gives it, a weight as it is drawn, and targets."""
    generator, dtype = torch.Generator().manual_seed(sizes.seed), getattr(torch, sizes.dtype)
    x = torch.randn(sizes.tokens, sizes.width, generator=generator).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(sizes.vocabulary, sizes.width, generator=generator)).to(dtype).requires_grad_()
    return x, weight, torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator)


def step(variant: str, x: Tensor, weight: Tensor, target: Tensor) -> None:
    x.grad = weight.grad = None
    VARIANTS[variant](x, weight, target).backward()


def variants(sizes: HeadSizes) -> Steps:
    arguments = inputs(sizes)
    return {variant: partial(step, variant, *arguments) for variant in VARIANTS}


def check(sizes: HeadSizes, steps: Any = None) -> str:
    """Raises unless ckptfused's gradients are right, as `checks.worst_error`; returns what was shown."""

    def found(variant: str, *arguments: Tensor) -> dict[str, Tensor]:
        step(variant, *arguments)
        return {"x": arguments[0].grad, "weight": arguments[1].grad}  # type: ignore[dict-item]

    x, weight, target = inputs(replace(sizes, tokens=CHECKED_TOKENS, vocabulary=CHECKED_CLASSES))
    exact = found(PLAIN, *(t.detach().double().requires_grad_() for t in (x, weight)), target)
    own = found(PLAIN, x, weight, target)
    ours = (found(variant, x, weight, target) for variant in (GRADIENTS, INPUTS))
    worst = max(worst_error(exact, own, gradients, x.dtype) for gradients in ours)
    return f"gradients of x and weight at most {worst:.2f} of the allowed error against float64"


def peak(step: Any) -> dict[str, int]:
    """Bytes of a step that makes its gradients."""
    _, x, weight, _ = step.args
    x.grad = weight.grad = None
    return {"peak": memory_of(step).peak}


BENCHMARK = Benchmark(
    name="loss-head",
    doc=__doc__,
    sizes=HeadSizes(),
    variants=variants,
    check=check,
    figures=lambda sizes, steps: {variant: peak(step) for variant, step in steps.items()},
    columns=(
        mib("peak, with gradients", "peak", ",.0f"),
        ratio("time", PLAIN),
        ratio("of the products'", PRODUCTS),
    ),
    goals=lambda sizes: (Goal(GRADIENTS, PLAIN, 0.8), Goal(GRADIENTS, CHUNKED, 0.9)),
    stem=lambda sizes: f"loss-head-{sizes.tokens}x{sizes.width}-{sizes.vocabulary}-{sizes.dtype}",
    shape=lambda sizes, rows: (
        f"{sizes.dtype}, {sizes.tokens:,} tokens of width {sizes.width}, {sizes.vocabulary:,} classes; forward and "
        "backward, gradients of x and weight."
    ),
)
