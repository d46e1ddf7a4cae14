"""GPT-NeoX (Pythia): both halves beside each other, query, key and value rows head by head, partial RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.families.llama import rotary_example
from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.pieces import rate


class GPTNeoX(Family):
    """With `use_parallel_residual` or without."""

    name = "gpt_neox"
    layers = ("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer",)

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

    def inputs(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: Any = False,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Inputs | Reason:
        attn, rest = layer.attention, {"position_ids": position_ids, **kwargs}
        return decoder_inputs(layer, attn, hidden_states, attention_mask, layer_past, position_embeddings, rest)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        turned = layer.attention.rotary_ndims
        return (x,), rotary_example(turned + turned % 2, x)


register(GPTNeoX())
