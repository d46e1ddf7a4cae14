"""BERT, RoBERTa, ViT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)

from tests.models.zoo import VOCABULARY, Specimen, add, text_batch

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}


def maker(model: Any, config: Any, **options: Any) -> Any:
    def make(p: float, implementation: str) -> nn.Module:
        dropout = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
        return model(config(**{**SIZES, **dropout, **options}, attn_implementation=implementation))

    return make


def bert_layers(model: Any) -> list[nn.Module]:
    return list(model.bert.encoder.layer)


def vit_layers(model: Any) -> list[nn.Module]:
    return list(model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer)


def whole(model: Any) -> None:
    """In chunks PyTorch would call dropout more often."""
    for layer in bert_layers(model):
        layer.chunk_size_feed_forward = 0  # type: ignore[assignment]


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randn(3, 3, 20, 20, generator=generator),
        "labels": torch.tensor([0, 3, 1]),
    }


for name, make in (
    ("bert", maker(BertForMaskedLM, BertConfig, **TEXT)),
    ("bert-chunks", maker(BertForMaskedLM, BertConfig, **TEXT, hidden_act="gelu_new", chunk_size_feed_forward=10)),
    ("bert-decoder", maker(BertLMHeadModel, BertConfig, **TEXT, is_decoder=True)),
):
    own = ("bert.embeddings.dropout",)
    add(Specimen(name, make, lambda: text_batch(length=20), bert_layers, own_dropout=own, zero="key.bias", still=whole))

add(
    Specimen(
        "roberta",
        maker(RobertaForMaskedLM, RobertaConfig, **TEXT, hidden_act="relu"),
        text_batch,
        lambda model: list(model.roberta.encoder.layer),
        own_dropout=("roberta.embeddings.dropout",),
        zero="key.bias",
    )
)

for name, options in (("vit", {}), ("vit-wide-heads", {"head_dim": 20, "qkv_bias": False})):
    add(
        Specimen(
            name,
            maker(ViTForImageClassification, ViTConfig, image_size=20, patch_size=5, num_labels=4, **options),
            images,
            vit_layers,
            own_dropout=("vit.embeddings.dropout",),
            zero=("k_proj.bias", "key.bias"),
        )
    )
