"""Bytes that a layer of each model family saves for backward per token, before and after `ckptfused.convert`.

Models have the sizes of the configuration's defaults and one or two layers; they lie on the meta device, so nothing is
computed. "Before" counts what autograd saves of the layer's own forward with flash attention, every storage once.
Prints a Markdown table; docs/convert.md quotes it.

    python -m benchmarks families
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import ckptfused

# (what the table says, class, configuration, options over its defaults)
MODELS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "Llama (Llama-3-8B)",
        *("LlamaForCausalLM", "LlamaConfig"),
        {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8},
    ),
    ("Mistral (7B)", "MistralForCausalLM", "MistralConfig", {}),
    ("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", {}),
    ("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", {}),
    ("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", {}),
    ("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", {}),
    ("Phi-3 (mini)", "Phi3ForCausalLM", "Phi3Config", {}),
    ("GPT-2", "GPT2LMHeadModel", "GPT2Config", {}),
    ("GPT-NeoX (20B)", "GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    ("OPT", "OPTForCausalLM", "OPTConfig", {}),
    ("BERT (base)", "BertForMaskedLM", "BertConfig", {}),
    ("RoBERTa (base)", "RobertaForMaskedLM", "RobertaConfig", {}),
    ("ViT (base)", "ViTForImageClassification", "ViTConfig", {}),
    ("Mixtral (8x7B)", "MixtralForCausalLM", "MixtralConfig", {}),
    ("Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {}),
    ("T5 (small)", "T5ForConditionalGeneration", "T5Config", {}),
    ("Whisper (tiny)", "WhisperForConditionalGeneration", "WhisperConfig", {}),
)
TORCH: tuple[tuple[str, Any, Any], ...] = (
    ("torch.nn, width 512", nn.TransformerEncoder, nn.TransformerEncoderLayer),
    ("torch.nn, width 512", nn.TransformerDecoder, nn.TransformerDecoderLayer),
)
# Names that configurations give to their number of layers.
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def models() -> Iterator[tuple[str, nn.Module]]:
    """Shallow models on the meta device, by the name that the table gives them."""
    for name, model_class, config_class, options in MODELS:
        yield name, hugging_face(model_class, config_class, options)
    for name, stack, layer in TORCH:
        yield name, stack(layer(512, 8, batch_first=True, device="meta"), 2)


def hugging_face(model_class: str, config_class: str, options: dict[str, Any]) -> nn.Module:
    """A model of the configuration's defaults, two layers deep."""
    import transformers

    defaults = getattr(transformers, config_class)()
    shallow = {name: 2 for name in DEPTHS if getattr(defaults, name, 0)}
    config = getattr(transformers, config_class)(**{**options, **shallow})
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


def layers_of(model: nn.Module) -> Iterator[Any]:
    """The reports of one layer of each class."""
    seen = set()
    for layer in ckptfused.convert(model.to(torch.bfloat16)).layers:
        if layer.layer not in seen:
            seen.add(layer.layer)
            yield layer


def main(words: Sequence[str]) -> None:
    logging.disable(logging.WARNING)
    print("| model | layer | path | bytes/token before | after | ratio |\n|---|---|---|---|---|---|")
    for name, model in models():
        for layer in layers_of(model):
            before, after = layer.before, layer.after
            numbers = ["?" if v is None else f"{v:,.0f}" for v in (before, after)]
            ratio = f"{before / after:.1f}×" if before and after else ""
            print(f"| {name} | {layer.layer} | {layer.path} | {numbers[0]} | {numbers[1]} | {ratio} |", flush=True)
