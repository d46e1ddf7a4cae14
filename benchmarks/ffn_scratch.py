"""Peak memory and time of a block's backward under limits of its FFN's hidden-wide scratch.

One Llama-style block that saves its input only. Gradients differ in bits from limit to limit, as sums over tiles do,
and are checked against float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Column, Sizes, Steps, mib, option, ratio
from benchmarks.checks import worst_error
from benchmarks.memory import memory_of
from ckptfused import cost
from ckptfused.functional import block
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec, param_shapes

LIMITS = {f"{size} MiB": size << 20 for size in (1024, 64, 16, 4)}
WHOLE = "1024 MiB"
"""The limit that cuts nothing."""
CHECKED_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class ScratchSizes(Sizes):
    """The block and its input."""

    tokens: int = 8192
    width: int = 1024
    hidden: int = 2816
    heads: int = 8
    dtype: str = option("float32", "bfloat16")

    def spec(self, scratch: int = 0) -> BlockSpec:
        """The block with so many bytes of scratch."""
        attention = AttentionSpec(self.heads, self.heads, self.width // self.heads, pre="rmsnorm", causal=True)
        return BlockSpec(attention, FFNSpec("swiglu", self.hidden, pre="rmsnorm"), scratch=scratch)


def block_tensors(
    spec: BlockSpec, tokens: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x, the gradient that comes back, and parameters without biases, all of which ask for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=generator)).to(dtype)

    params = {
        name: (normal(*shape, std=shape[-1] ** -0.5) if len(shape) == 2 else torch.ones(shape, dtype=dtype))
        for name, (shape, _) in param_shapes(spec, width).items()
        if not name.endswith(("_b", "bias"))
    }
    size = (1, tokens, width)
    return normal(*size).requires_grad_(), normal(*size), {name: t.requires_grad_() for name, t in params.items()}


def tensors(sizes: ScratchSizes) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The tensors of the sizes."""
    return block_tensors(sizes.spec(), sizes.tokens, sizes.width, getattr(torch, sizes.dtype), sizes.seed)


def gradients(spec: BlockSpec, x: Tensor, dy: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of x and of the parameters that ask for one."""
    leaves = {"x": x, **{name: t for name, t in params.items() if t.requires_grad}}
    found = torch.autograd.grad(block(x, params, spec), list(leaves.values()), dy)
    return dict(zip(leaves, found, strict=True))


def check(sizes: ScratchSizes, steps: Any = None) -> str:
    """Raises unless every limit's gradients are right, as `checks.worst_error`; returns what was shown."""
    x, dy, params = tensors(replace(sizes, tokens=CHECKED_TOKENS))

    def double(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_()

    exact = gradients(sizes.spec(), double(x), double(dy), {name: double(t) for name, t in params.items()})
    whole, worst = gradients(sizes.spec(), x, dy, params), 0.0
    for limit in LIMITS.values():
        cut = sizes.spec(limit * CHECKED_TOKENS // sizes.tokens)
        worst = max(worst, worst_error(exact, whole, gradients(cut, x, dy, params), x.dtype))
    return f"gradients in tiles at most {worst:.2f} of the allowed error against float64"


def variants(sizes: ScratchSizes) -> Steps:
    """A backward of each limit."""
    x, dy, params = tensors(sizes)
    leaves = [x, *params.values()]
    results = {name: block(x, params, sizes.spec(limit)) for name, limit in LIMITS.items()}
    return {name: partial(torch.autograd.grad, y, leaves, dy, retain_graph=True) for name, y in results.items()}


def figures(sizes: ScratchSizes, step: Any, limit: int) -> dict[str, Any]:
    """The peak, the gradients' part of it, and the tiles."""
    size = getattr(torch, sizes.dtype).itemsize
    rows, columns = cost.ffn_tiles(sizes.tokens, sizes.width, sizes.hidden, True, size, limit)
    gradient_bytes = sum(leaf.nbytes for leaf in step.args[1])
    return {"peak": memory_of(step).peak, "gradients": gradient_bytes, "tiles": f"{rows} × {columns}"}


BENCHMARK = Benchmark(
    name="ffn-scratch",
    doc=__doc__,
    sizes=ScratchSizes(),
    variants=variants,
    check=check,
    figures=lambda sizes, steps: {name: figures(sizes, step, LIMITS[name]) for name, step in steps.items()},
    columns=(
        Column("tiles of", lambda row, rows: "one piece" if row["tiles"] == rows[WHOLE]["tiles"] else row["tiles"]),
        mib("peak", "peak", ",.0f"),
        ratio("time", WHOLE),
    ),
    stem=lambda sizes: f"ffn-scratch-{sizes.tokens}x{sizes.width}-{sizes.dtype}",
    shape=lambda sizes, rows: (
        f"{sizes.dtype}, backward of one pre-norm block, C {sizes.width}, F {sizes.hidden}, SwiGLU, {sizes.heads} "
        f"heads, {sizes.tokens:,} tokens, that saved its input. Of each peak "
        f"{rows[WHOLE]['gradients'] / 2**20:.0f} MiB are its gradients."
    ),
)
