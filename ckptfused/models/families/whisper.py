"""Whisper: pre-norm LayerNorm, keys without bias, dropout inside the FFN. Cross attention is checkpointed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.models.cache_arguments import to_fill
from ckptfused.models.family import Family, register
from ckptfused.models.hugging_face import HuggingFace, layer_inputs
from ckptfused.models.steps import Fused, Generic, Steps

_MODEL = "transformers.models.whisper.modeling_whisper"


class WhisperEncoder(HuggingFace):
    """Whisper's encoder."""

    name = "whisper_encoder"
    layers = (f"{_MODEL}.WhisperEncoderLayer",)

    def parts(self, layer: Any) -> Parts:
        return whisper_parts(layer)

    def inputs_named(self, layer: Any, given: dict[str, Any]) -> Inputs | Reason:
        if given["hidden_states"].dtype == torch.float16:
            return Reason("values are clamped in float16")
        return super().inputs_named(layer, given)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, None), {}


class WhisperDecoder(Family):
    """Whisper's decoder; fused whole where there is no encoder."""

    name = "whisper_decoder"
    layers = (f"{_MODEL}.WhisperDecoderLayer",)

    def parts(self, layer: Any) -> Parts:
        return whisper_parts(layer)

    def steps(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: Any = True,
        **kwargs: Any,
    ) -> Steps | Reason:
        given = {"hidden_states": hidden_states, "attention_mask": attention_mask, "past_key_values": past_key_values}
        inputs = layer_inputs(layer, layer.self_attn, {**given, **kwargs})
        if isinstance(inputs, Reason):
            return inputs
        parts = self.parts(layer)
        if encoder_hidden_states is None:
            return (Fused(parts, inputs),)
        encoder = (encoder_hidden_states, encoder_attention_mask)
        kwargs["past_key_values"] = to_fill(past_key_values)
        return (
            Fused(Parts(attn=parts.attn), inputs),
            Generic("cross attention", partial(_cross, layer), encoder, kwargs),
            Fused(Parts(ffn=parts.ffn), Inputs(hidden_states)),
        )

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), {"encoder_hidden_states": torch.empty_like(x)}


def whisper_parts(layer: Any) -> Parts:
    """Both halves of an encoder layer, or of a decoder layer."""
    attn = layer.self_attn
    p_res = layer.dropout if layer.training else 0.0
    return Parts(
        Attention(
            heads=attn.num_heads,
            kv_heads=attn.num_heads,
            head_dim=attn.head_dim,
            q=attn.q_proj,
            k=attn.k_proj,
            v=attn.v_proj,
            o=attn.out_proj,
            scale=attn.scaling,
            p_attn=attn.dropout if attn.training else 0.0,
            p_res=p_res,
            holders=(attn,),
            pre=layer.self_attn_layer_norm,
        ),
        FFN(
            layer.activation_fn,
            gate=None,
            up=layer.fc1,
            down=layer.fc2,
            p_hidden=layer.activation_dropout if layer.training else 0.0,
            p_res=p_res,
            pre=layer.final_layer_norm,
        ),
    )


def _cross(layer: Any, x: Tensor, encoder_hidden_states: Tensor, mask: Any, **kwargs: Any) -> Tensor:
    normed = layer.encoder_attn_layer_norm(x)
    found, _ = layer.encoder_attn(normed, key_value_states=encoder_hidden_states, attention_mask=mask, **kwargs)
    return x + F.dropout(found, p=layer.dropout, training=layer.training)


register(WhisperEncoder())
register(WhisperDecoder())
