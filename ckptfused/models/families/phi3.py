"""Phi-3: Llama with joint projections, dropout of both residuals, and RoPE that may turn part of a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.layer.parts import FFN, Attention, Parts
from ckptfused.layer.projections import rate
from ckptfused.models.families.llama import Llama
from ckptfused.models.family import register
from ckptfused.models.hugging_face import rotary_example


class Phi3(Llama):
    """Phi-3 and what is published in its format, Phi-4 among them; its forward takes the arguments of Llama's."""

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

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), {"attention_mask": None, **rotary_example(layer.self_attn.head_dim, x)}


register(Phi3())
