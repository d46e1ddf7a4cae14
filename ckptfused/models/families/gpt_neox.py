"""GPT-NeoX (Pythia): both halves beside each other, query, key and value rows head by head, partial RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.layer.parts import FFN, Attention, Parts
from ckptfused.layer.projections import rate
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace, rotary_example


class GPTNeoX(HuggingFace):
    """The adapter of GPT-NeoX's layer, with `use_parallel_residual` or without."""

    name = "gpt_neox"
    layers = ("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer",)
    arguments = (
        *("hidden_states", "attention_mask", "position_ids", "use_cache", "layer_past", "position_embeddings"),
    )

    def self_attention(self, layer: Any) -> Any:
        return layer.attention

    def parts(self, layer: Any) -> Parts:
        attn, mlp = layer.attention, layer.mlp
        heads = attn.config.num_attention_heads
        first = Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=attn.head_size,
            q=attn.query_key_value,
            k=None,
            v=None,
            o=attn.dense,
            pre=layer.input_layernorm,
            rope="half",
            scale=attn.scaling,
            p_attn=attn.attention_dropout if attn.training else 0.0,
            p_res=rate(layer.post_attention_dropout),
            interleaved=True,
            holders=(attn, layer.post_attention_dropout),
        )
        second = FFN(
            mlp.act,
            None,
            mlp.dense_h_to_4h,
            mlp.dense_4h_to_h,
            pre=layer.post_attention_layernorm,
            p_res=rate(layer.post_mlp_dropout),
            holders=(mlp, layer.post_mlp_dropout),
        )
        return Parts(first, second, parallel=bool(layer.use_parallel_residual))

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        turned = layer.attention.rotary_ndims
        return (x,), rotary_example(turned + turned % 2, x)


register(GPTNeoX())
