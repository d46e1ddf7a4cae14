"""A training step (forward and backward) of a stack of Llama-style layers in four variants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.benchmark import Benchmark, Goal, Rows, Sizes, Steps, option, ratio
from benchmarks.cases import CASES, GOALS, LLAMA, Case
from benchmarks.checks import check_gradients
from ckptfused.cli.models import VARIANTS, Variant, plain_layers, variant_layers

PLAIN, CHECKPOINTED, OURS = "plain", "torch.utils.checkpoint", "ckptfused inputs"


@dataclass(frozen=True, kw_only=True)
class StackSizes(Sizes):
    """One of the shapes in `cases.py`, in one type."""

    case: str = option(*CASES, every=False)
    dtype: str = option(*GOALS)


def step(layers: nn.ModuleList, x: Tensor, dy: Tensor) -> None:
    """One forward and backward; gradients are freed, as zero_grad() does by default."""
    layers.zero_grad(set_to_none=True)
    x.grad = None
    y = x
    for layer in layers:
        y = layer(y)
    y.backward(dy)


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


def variants(sizes: StackSizes) -> Steps:
    stacks, x, dy = make_stacks(CASES[sizes.case], getattr(torch, sizes.dtype), sizes.seed)
    return {name: partial(step, layers, x, dy) for name, layers in stacks.items()}


def check(sizes: StackSizes, steps: Any) -> str:
    return "; ".join(check_gradients(CASES[sizes.case], getattr(torch, sizes.dtype), sizes.seed))


def goals(sizes: StackSizes) -> list[Goal]:
    limits = GOALS[sizes.dtype] if sizes.case == LLAMA.name else {}
    return [Goal(OURS, name, limit) for name, limit in limits.items()]


def shape(sizes: StackSizes, rows: Rows) -> str:
    case = CASES[sizes.case]
    return (
        f"{sizes.dtype}, {case.shape.layers} layers, C {case.shape.d_model}, F {case.shape.dim_feedforward}, "
        f"{case.shape.nhead} heads, {case.batch} × {case.tokens} tokens, residual dropout "
        f"{case.shape.residual_dropout}."
    )


BENCHMARK = Benchmark(
    name="step-time",
    doc=__doc__,
    sizes=StackSizes(),
    variants=variants,
    check=check,
    columns=(ratio("of plain", PLAIN), ratio("of checkpoint", CHECKPOINTED)),
    goals=goals,
    stem=lambda sizes: f"{sizes.case}-{sizes.dtype}",
    shape=shape,
    budget=90.0,
)
