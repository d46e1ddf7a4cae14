"""A training step of `nn.TransformerEncoderLayer`s: as they are, under `torch.utils.checkpoint`, class swapped.

The layers have PyTorch's own defaults, dropout 0.1 among them unless another is asked for. The memory of a step is that
of a process which runs one variant alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.benchmark import Benchmark, Rows, Sizes, Steps, number, ratio
from benchmarks.checks import gradients, refuse_difference, worst_error
from benchmarks.step_time import step
from ckptfused import FusedCheckpointBlock
from ckptfused.cli.models import TorchCheckpoint

PLAIN, CHECKPOINTED, SWAPPED = "nn.TransformerEncoderLayer", "under torch.utils.checkpoint", "FusedCheckpointBlock"
VARIANTS = (PLAIN, CHECKPOINTED, SWAPPED)
CHECKED_TOKENS = 256  # a step of this many tokens is compared with float64


@dataclass(frozen=True, kw_only=True)
class EncoderSizes(Sizes):
    """The layers and the one sequence that they see."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    tokens: int = 4096
    dropout: float = 0.1


def plain_layers(sizes: EncoderSizes, **options: Any) -> nn.ModuleList:
    """PyTorch's layers with its own initial weights and defaults."""
    torch.manual_seed(sizes.seed)
    return nn.ModuleList(nn.TransformerEncoderLayer(sizes.width, sizes.heads, **options) for _ in range(sizes.layers))


def as_asked(sizes: EncoderSizes) -> nn.ModuleList:
    """PyTorch's layers in bfloat16 with the dropout of the sizes."""
    return plain_layers(sizes, dropout=sizes.dropout).bfloat16()


def variant_layers(variant: str, plain: nn.ModuleList, sizes: EncoderSizes, **options: Any) -> nn.ModuleList:
    """The same layers as `variant` trains them: with the same weights, or the same parameters."""
    if variant == PLAIN:
        return plain
    if variant == CHECKPOINTED:
        return nn.ModuleList(map(TorchCheckpoint, plain))
    dtype = next(plain.parameters()).dtype
    swapped = nn.ModuleList(FusedCheckpointBlock(sizes.width, sizes.heads, **options) for _ in plain).to(dtype)
    swapped.load_state_dict(plain.state_dict())
    return swapped


def sequence(sizes: EncoderSizes, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """One sequence [T, 1, C], and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, 1, sizes.width, generator=generator) for _ in range(2))
    return x.bfloat16(), dy.bfloat16()


def check(sizes: EncoderSizes, steps: Any = None) -> str:
    """Raises unless the swapped layers' gradients are right, as `checks.check_gradients`; returns what was shown."""
    x, dy = sequence(sizes, min(sizes.tokens, CHECKED_TOKENS), sizes.seed + 1)
    plain = plain_layers(sizes, dropout=0.0).bfloat16()
    truth = plain_layers(sizes, dropout=0.0).double()
    truth.load_state_dict(plain.state_dict())
    exact = gradients(truth, x.double(), dy.double(), sizes.seed)
    eager = gradients(plain, x, dy, sizes.seed)
    ours = gradients(variant_layers(SWAPPED, plain, sizes, dropout=0.0), x, dy, sizes.seed)
    worst = worst_error(exact, eager, ours, torch.bfloat16)
    kept, rebuilt = (
        gradients(variant_layers(SWAPPED, plain, sizes, keep=keep), x, dy, sizes.seed) for keep in ("all", "inputs")
    )
    refuse_difference(kept, rebuilt)
    return (
        f"without dropout at most {worst:.2f} of the allowed error against float64; "
        "with dropout 0.1 the same bits keeping everything and saving inputs only"
    )


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the memory of a process is read from Linux's /proc, and {field} is not there")


def step_memory(sizes: EncoderSizes, variant: str) -> dict[str, int]:
    """Bytes by which the first step's peak exceeds what this process held before it, gradients included."""
    layers = variant_layers(variant, as_asked(sizes), sizes, dropout=sizes.dropout)
    x, dy = sequence(sizes, sizes.tokens, sizes.seed)
    step(layers, x[:64].clone().requires_grad_(), dy[:64])  # libraries load, thread pools start
    layers.zero_grad(set_to_none=True)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    step(layers, x.requires_grad_(), dy)
    return {"peak": memory("VmHWM") - before}


def variants(sizes: EncoderSizes) -> Steps:
    plain = as_asked(sizes)
    x, dy = sequence(sizes, sizes.tokens, sizes.seed)
    x.requires_grad_()
    layers = {variant: variant_layers(variant, plain, sizes, dropout=sizes.dropout) for variant in VARIANTS}
    return {variant: partial(step, made, x, dy) for variant, made in layers.items()}


def shape(sizes: EncoderSizes, rows: Rows) -> str:
    return (
        f"bfloat16, {sizes.layers} × `nn.TransformerEncoderLayer({sizes.width}, {sizes.heads})` with its defaults (F "
        f"2048, dropout {sizes.dropout:g}), one sequence of {sizes.tokens} tokens; forward and backward. Peak "
        "memory: resident memory at its highest in a process's first step, less that before the step."
    )


BENCHMARK = Benchmark(
    name="encoder-step",
    doc=__doc__,
    sizes=EncoderSizes(),
    variants=variants,
    check=check,
    alone=step_memory,
    columns=(
        number("peak of a step, MB", "peak", ",.0f", 1e6),
        ratio("time", PLAIN),
        ratio("memory", PLAIN, "peak"),
        ratio("time of checkpoint's", CHECKPOINTED),
    ),
    stem=lambda sizes: (
        f"encoder-{sizes.layers}x{sizes.width}x{sizes.tokens}" + ("" if sizes.dropout else "-without-dropout")
    ),
    shape=shape,
    budget=200.0,
)
