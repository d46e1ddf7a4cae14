"""Phi-3: Llama with joint projections, dropout of both residuals, and RoPE that may turn part of a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.families.llama import rotary_example
from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.convert.modules import rate
from ckptfused.convert.parts import FFN, Attention, Inputs, Parts, Reason


class Phi3(Family):
    """Phi-3 and what is published in its format, Phi-4 among them."""

    name = "phi3"
    layers = ("transformers.models.phi3.modeling_phi3.Phi3DecoderLayer",)

    def parts(self, layer: Any) -> Parts:
        attn, mlp = layer.self_attn, layer.mlp
        first = Attention(
            heads=attn.config.num_attention_heads,
            kv_heads=attn.num_key_value_heads,
            head_dim=attn.head_dim,
            q=attn.qkv_proj,
            k=None,
            v=None,
            o=attn.o_proj,
            pre=layer.input_layernorm,
            rope="half",
            scale=attn.scaling,
            window=getattr(attn.config, "sliding_window", None),
            p_attn=attn.attention_dropout if attn.training else 0.0,
            p_res=rate(layer.resid_attn_dropout),
            holders=(attn, layer.resid_attn_dropout),
        )
        second = FFN(
            mlp.activation_fn,
            mlp.gate_up_proj,
            None,
            mlp.down_proj,
            pre=layer.post_attention_layernorm,
            p_res=rate(layer.resid_mlp_dropout),
            holders=(mlp, layer.resid_mlp_dropout),
        )
        return Parts(first, second)

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
        attn, rest = layer.self_attn, {"position_ids": position_ids, **kwargs}
        return decoder_inputs(layer, attn, hidden_states, attention_mask, past_key_values, position_embeddings, rest)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), {"attention_mask": None, **rotary_example(layer.self_attn.head_dim, x)}


register(Phi3())
