"""The memory of whole training steps of Llama-3-8B, Qwen3-8B and Gemma-2-9B, predicted on the meta device.

Peak by part in bfloat16, all weights with AdamW and LoRA of rank 16; the longest sequence in 80 GiB. Nothing is
measured; tests/simulate holds the same predictions to PyTorch's allocator on small models. Needs transformers and peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.benchmark import Benchmark, Column, Rows, Sizes, number, option
from ckptfused.cli.configurations import MODELS
from ckptfused.cli.language_models import VARIANTS, Trained
from ckptfused.cli.longest_context import longest

GIB = 2**30
MEMORY = 80 * GIB
PARTS = ("peak", "weights", "optimizer", "gradients", "activations", "loss_head", "transients")


@dataclass(frozen=True, kw_only=True)
class PredictedSizes(Sizes):
    """A model, its adapters' rank (0: all weights are trained), and the tokens of a step."""

    model: str = option(*MODELS)
    lora: int = option(0, 16)
    tokens: int = 8192


def figures(sizes: PredictedSizes, steps: Any) -> Rows:
    """The parts of each way to train, and the longest sequence that fits."""
    found: Rows = {}
    for variant in VARIANTS:
        model = Trained(MODELS[sizes.model], variant, torch.bfloat16, sizes.lora or None)
        found[variant] = model.step(sizes.tokens).sizes() | {"longest": longest(model.step, MEMORY).tokens}
    return found


BENCHMARK = Benchmark(
    name="predicted-steps",
    doc=__doc__,
    sizes=PredictedSizes(),
    figures=figures,
    columns=(
        *(number(f"{part.replace('_', ' ')}, GiB", part, ",.2f", GIB) for part in PARTS),
        Column("at", lambda row, rows: row["moment"]),
        Column("longest", lambda row, rows: f"{row['longest']:,}" if row["longest"] else "none"),
    ),
    case=lambda sizes: f"{sizes.model}, {f'LoRA of rank {sizes.lora}' if sizes.lora else 'all weights'}",
    stem=lambda sizes: f"predicted-steps-{sizes.tokens}",
    shape=lambda sizes, rows: (
        f"Batch 1, {sizes.tokens:,} tokens, bfloat16, fused AdamW, on a GPU; GiB at the peak, by part. Longest: tokens "
        "that fit into 80 GiB, a multiple of 256. Without the CUDA context, workspaces of libraries and fragmentation. "
        "Hugging Face's Gemma 2 has eager attention."
    ),
)
