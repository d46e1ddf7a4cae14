"""Mixtures of experts with Llama's attention: that half is fused, norm, router and experts are checkpointed."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.models.families.llama import Llama, attention, ffn
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace
from ckptfused.models.steps import Fused, Generic, Steps

_MODELS = "transformers.models"


class Mixtral(HuggingFace):
    """Mixtral."""

    name = "mixtral"
    layers = (f"{_MODELS}.mixtral.modeling_mixtral.MixtralDecoderLayer",)
    arguments: tuple[str, ...] = (
        *("hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"),
    )
    made = ("router_logits",)  # the checkpointed piece calls the router, so that hooks on it collect these

    def parts(self, layer: Any) -> Parts:
        return Parts(attention(layer.self_attn, layer.input_layernorm))

    def steps(self, layer: Any, *args: Any, **kwargs: Any) -> Steps | Reason:
        inputs = self.inputs(layer, *args, **kwargs)
        return inputs if isinstance(inputs, Reason) else steps_of(layer, self.parts(layer), inputs)


class Qwen3Moe(Mixtral):
    """Qwen3-MoE, whose layers without experts are fused whole."""

    name = "qwen3_moe"
    layers = (f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",)
    arguments = Llama.arguments

    def parts(self, layer: Any) -> Parts:
        attn = attention(layer.self_attn, layer.input_layernorm)
        return (
            Parts(attn)
            if hasattr(layer.mlp, "experts")
            else Parts(attn, ffn(layer.mlp, layer.post_attention_layernorm))
        )


def steps_of(layer: Any, parts: Parts, inputs: Inputs) -> Steps:
    """The steps of a layer, with or without experts."""
    if parts.ffn is not None:
        return (Fused(parts, inputs),)
    return Fused(parts, inputs), Generic("a mixture of experts", partial(_experts, layer))


def _experts(layer: Any, x: Tensor) -> Tensor:
    return x + layer.mlp(layer.post_attention_layernorm(x))


register(Mixtral())
register(Qwen3Moe())
