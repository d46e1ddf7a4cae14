"""Llama and what is built like it: pre-norm RMSNorm, RoPE, grouped queries, gated FFN, separate weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.source import class_name

_MODELS = "transformers.models"


class Llama(Family):
    """Llama, Mistral, Qwen2, Qwen3."""

    name = "llama"
    layers: tuple[str, ...] = (
        f"{_MODELS}.llama.modeling_llama.LlamaDecoderLayer",
        f"{_MODELS}.mistral.modeling_mistral.MistralDecoderLayer",
        f"{_MODELS}.qwen2.modeling_qwen2.Qwen2DecoderLayer",
        f"{_MODELS}.qwen3.modeling_qwen3.Qwen3DecoderLayer",
    )

    def parts(self, layer: Any) -> Parts:
        return Parts(attention(layer.self_attn, layer.input_layernorm), ffn(layer.mlp, layer.post_attention_layernorm))

    def inputs(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Inputs | Reason:
        return decoder_inputs(
            layer,
            layer.self_attn,
            hidden_states,
            attention_mask,
            past_key_values,
            position_embeddings,
            {"position_ids": position_ids, **kwargs},
        )

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), rotary_example(layer.self_attn.head_dim, x)


def rotary_example(width: int, x: Tensor) -> dict[str, Any]:
    """Rotary tables as the models hand them to their layers."""
    table = x.detach().new_ones(1, x.size(1), width)
    return {"position_embeddings": (table, table)}


def attention(attn: Any, pre: Any, post: Any = None) -> Attention:
    """The attention half around a module with q_proj, k_proj, v_proj and o_proj."""
    config = attn.config
    # Mistral asks the configuration, which in others may say something that nobody reads.
    window = config.sliding_window if _is_mistral(attn) else getattr(attn, "sliding_window", None)
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attn.head_dim,
        q=attn.q_proj,
        k=attn.k_proj,
        v=attn.v_proj,
        o=attn.o_proj,
        pre=pre,
        post=post,
        q_norm=getattr(attn, "q_norm", None),
        k_norm=getattr(attn, "k_norm", None),
        rope="half",
        rotary_dim=attn.head_dim,
        scale=attn.scaling,
        window=window,
        p_attn=attn.attention_dropout if attn.training else 0.0,
        holders=(attn,),
    )


def _is_mistral(attn: Any) -> bool:
    return class_name(type(attn)) == f"{_MODELS}.mistral.modeling_mistral.MistralAttention"


def ffn(mlp: Any, pre: Any, post: Any = None) -> FFN:
    """The FFN half around a module with gate_proj, up_proj, act_fn and down_proj."""
    return FFN(mlp.act_fn, mlp.gate_proj, mlp.up_proj, mlp.down_proj, pre=pre, post=post, holders=(mlp,))


register(Llama())
