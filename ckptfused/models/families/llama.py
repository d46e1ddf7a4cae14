"""Llama and what is built like it: pre-norm RMSNorm, RoPE, grouped queries, gated FFN, separate weights."""

from __future__ import annotations

from typing import Any

from ckptfused.layer.parts import FFN, Attention, Parts
from ckptfused.layer.source import class_name
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace

_MODELS = "transformers.models"


class Llama(HuggingFace):
    """Llama, Mistral, Qwen2, Qwen3."""

    name = "llama"
    layers: tuple[str, ...] = (
        f"{_MODELS}.llama.modeling_llama.LlamaDecoderLayer",
        f"{_MODELS}.mistral.modeling_mistral.MistralDecoderLayer",
        f"{_MODELS}.qwen2.modeling_qwen2.Qwen2DecoderLayer",
        f"{_MODELS}.qwen3.modeling_qwen3.Qwen3DecoderLayer",
    )
    arguments: tuple[str, ...] = (
        *("hidden_states", "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"),
    )

    def parts(self, layer: Any) -> Parts:
        return Parts(attention(layer.self_attn, layer.input_layernorm), ffn(layer.mlp, layer.post_attention_layernorm))


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
