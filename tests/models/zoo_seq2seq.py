"""T5, Whisper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from tests.models.zoo import VOCABULARY, Sites, Specimen, add, text_batch

T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 88,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
FRAMES, MELS = 14, 10
WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES,
    "max_target_positions": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 88 for side in ("encoder", "decoder")},
    **{f"{kind}_token_id": i for i, kind in enumerate(("pad", "bos", "eos", "decoder_start"))},
    "begin_suppress_tokens": None,
}


# Attention of T5's own until transformers 5.14.
T5_IMPLEMENTATIONS = ("sdpa", "eager") if T5ForConditionalGeneration._supports_sdpa else ("eager",)


def t5(feed_forward: str) -> Any:
    def make(p: float, implementation: str) -> nn.Module:
        implementation = implementation if implementation in T5_IMPLEMENTATIONS else "eager"
        config = T5Config(**T5, dropout_rate=p, feed_forward_proj=feed_forward, attn_implementation=implementation)
        return T5ForConditionalGeneration(config)

    return make


def blocks(model: Any) -> list[nn.Module]:
    return [*model.encoder.block, *model.decoder.block]


def still_t5(model: Any) -> None:
    """Attention is checkpointed."""
    for block in blocks(model):
        for half in list(block.layer)[:-1]:  # type: ignore[arg-type]
            half.dropout.p = 0.0
            attention: Any = half.SelfAttention if hasattr(half, "SelfAttention") else half.EncDecAttention
            attention.dropout = 0.0


for name, feed_forward in (("t5", "relu"), ("t5-gated", "gated-gelu")):
    add(
        Specimen(
            name,
            t5(feed_forward),
            text_batch,
            blocks,
            "part",
            T5_IMPLEMENTATIONS,
            own_dropout=("encoder.dropout", "decoder.dropout"),
            sites=lambda layer: ((0, 2), (0, 3)),
            still=still_t5,
            since=(5, 4),
        )
    )


def whisper(model: Any) -> Any:
    def make(p: float, implementation: str) -> nn.Module:
        dropout = {"dropout": p, "attention_dropout": p, "activation_dropout": p}
        return model(WhisperConfig(**WHISPER, **dropout, attn_implementation=implementation))

    return make


def sound() -> dict[str, Tensor]:
    features = torch.randn(3, MELS, 2 * FRAMES, generator=torch.Generator().manual_seed(1))
    labels = text_batch(length=11)["labels"]
    return {"input_features": features, "labels": labels}


def still_whisper(model: Any) -> None:
    """Cross attention is checkpointed; its residual dropout is also that of the decoder's fused halves."""
    model.model.encoder.dropout = model.model.decoder.dropout = 0.0
    for layer in model.model.decoder.layers:
        layer.dropout = layer.encoder_attn.dropout = 0.0


def still_decoder(model: Any) -> None:
    model.model.decoder.dropout = 0.0


def whisper_sites(layer: Any) -> Sites:
    return ((0, 0), (1, 2)) if hasattr(layer, "encoder_attn") else ((0, 0), (0, 1), (0, 2), (0, 3))


add(
    Specimen(
        "whisper",
        whisper(WhisperForConditionalGeneration),
        sound,
        lambda model: [*model.model.encoder.layers, *model.model.decoder.layers],
        ("fused", "fused", "part", "part"),
        sites=whisper_sites,
        still=still_whisper,
        since=(5, 4),
    )
)
add(
    Specimen(
        "whisper-no-encoder",
        whisper(WhisperForCausalLM),
        lambda: text_batch(),
        lambda model: list(model.model.decoder.layers),
        "part",  # with an encoder; these calls run as one op
        sites=lambda layer: ((0, 0), (0, 1), (0, 2), (0, 3)),
        still=still_decoder,
        since=(5, 4),
    )
)
