"""Mixtures of experts with Llama's attention: that half is fused, norm, router and experts are checkpointed."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ckptfused.convert.composite import Composite, Fused, Generic, Steps
from ckptfused.convert.families.llama import attention, ffn, rotary_example
from ckptfused.convert.family import register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import Inputs, Parts, Reason

_MODELS = "transformers.models"
# The checkpointed piece calls the router, so that hooks on it collect these.
_MADE = ("router_logits",)


class Mixtral(Composite):
    """Mixtral."""

    name = "mixtral"
    layers = (f"{_MODELS}.mixtral.modeling_mixtral.MixtralDecoderLayer",)

    def parts(self, layer: Any) -> Parts:
        return Parts(attention(layer.self_attn, layer.input_layernorm))

    def steps(
        self,
        layer: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Steps | Reason:
        inputs = decoder_inputs(
            layer,
            layer.self_attn,
            hidden_states,
            attention_mask,
            past_key_values,
            position_embeddings,
            {"position_ids": position_ids, **kwargs},
            made=_MADE,
        )
        return inputs if isinstance(inputs, Reason) else steps_of(layer, self.parts(layer), inputs)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), rotary_example(layer.self_attn.head_dim, x)


class Qwen3Moe(Mixtral):
    """Qwen3-MoE, whose layers without experts are fused whole."""

    name = "qwen3_moe"
    layers = (f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",)

    def parts(self, layer: Any) -> Parts:
        attn = attention(layer.self_attn, layer.input_layernorm)
        return (
            Parts(attn)
            if hasattr(layer.mlp, "experts")
            else Parts(attn, ffn(layer.mlp, layer.post_attention_layernorm))
        )

    def steps(  # type: ignore[override]
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Steps | Reason:
        return super().steps(
            layer, hidden_states, position_embeddings, attention_mask, position_ids, past_key_values, **kwargs
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
