"""A training step (forward and backward) of one tiny layer, where nearly all is host time: Python and dispatch.

x is [1, 8, 32] float32, on one thread. Variants of Hugging Face's layer are there where transformers is installed.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

import ckptfused
from benchmarks.benchmark import PROCESSOR, Benchmark, Column, Rows, Sizes, Steps
from ckptfused import FusedCheckpointBlock

SHAPE, HEADS, HIDDEN = (1, 8, 32), 4, 64
ENCODER, BLOCK, LLAMA_BLOCK = "nn.TransformerEncoderLayer", "FusedCheckpointBlock", "FusedCheckpointBlock.llama"
ENCODER_CONVERTED, LLAMA, LLAMA_CONVERTED = f"{ENCODER}, converted", "LlamaDecoderLayer", "LlamaDecoderLayer, converted"
AGAINST = {BLOCK: ENCODER, LLAMA_BLOCK: ENCODER, ENCODER_CONVERTED: ENCODER, LLAMA_CONVERTED: LLAMA}
"""What each variant is compared with."""


def variants(sizes: Sizes) -> Steps:
    width = SHAPE[-1]
    encoder = nn.TransformerEncoderLayer(width, HEADS, HIDDEN, 0.0, batch_first=True)
    converted = copy.deepcopy(encoder)
    ckptfused.convert(converted)
    layers: dict[str, Any] = {
        ENCODER: encoder,
        BLOCK: FusedCheckpointBlock(width, HEADS, HIDDEN, 0.0, batch_first=True),
        LLAMA_BLOCK: FusedCheckpointBlock.llama(width, HEADS, HIDDEN),
        ENCODER_CONVERTED: converted,
    }
    try:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    except ImportError:
        return steps_of(layers)
    known: dict[str, Any] = {"hidden_size": width, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
    config = LlamaConfig(**known, attn_implementation="sdpa")  # type: ignore[call-arg]
    table = torch.ones(1, SHAPE[1], width // HEADS)
    layer = LlamaDecoderLayer(config, 0)
    fused = copy.deepcopy(layer)
    ckptfused.convert(fused)
    layers[LLAMA] = lambda x: layer(x, position_embeddings=(table, table))
    layers[LLAMA_CONVERTED] = lambda x: fused(x, position_embeddings=(table, table))
    return steps_of(layers)


def steps_of(layers: dict[str, Any]) -> Steps:
    """Forward and backward of each, on one input."""
    x, dy = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)

    def step(layer: Any) -> None:
        x.grad = None
        layer(x).backward(dy)

    return {name: partial(step, layer) for name, layer in layers.items()}


def of_plain(row: dict[str, Any], rows: Rows) -> str:
    """The ratio to the layer that a variant stands for."""
    name = next(name for name, each in rows.items() if each is row)
    return f"{row['median'] / rows[AGAINST[name]]['median']:.3f}" if AGAINST.get(name) in rows else ""


BENCHMARK = Benchmark(
    name="host-time",
    doc=__doc__,
    sizes=Sizes(),
    variants=variants,
    columns=(Column("of the plain layer's", of_plain),),
    said=lambda sizes, rows: [f"Forward and backward of x {list(SHAPE)} float32, processor time, one thread."],
    budget=6.0,
    clock=PROCESSOR,
    threads=1,
)
