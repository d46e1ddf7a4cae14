"""Llama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models.zoo import VOCABULARY, Specimen, add, text_batch

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def maker(model: Any, config: Any, **options: Any) -> Any:
    def make(p: float, implementation: str) -> nn.Module:
        return model(config(**SIZES, attention_dropout=p, attn_implementation=implementation, **options))

    return make


def decoder_layers(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


for name, make, left in (
    ("llama", maker(LlamaForCausalLM, LlamaConfig), False),
    ("llama-bias", maker(LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True), True),
    ("mistral-window", maker(MistralForCausalLM, MistralConfig, sliding_window=5, head_dim=16), False),
    ("qwen2", maker(Qwen2ForCausalLM, Qwen2Config), True),
    ("qwen3", maker(Qwen3ForCausalLM, Qwen3Config, head_dim=20), False),
):
    add(Specimen(name, make, lambda left=left: text_batch(left=left), decoder_layers))
