"""ViT: pre-norm LayerNorm, separate weights, one dropout module for both residuals, no mask."""

from __future__ import annotations

from typing import Any

from ckptfused.layer.parts import FFN, Attention, Parts
from ckptfused.layer.projections import rate
from ckptfused.models.families.bert import parts_named_as_here
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace


class ViT(HuggingFace):
    """ViT. Until transformers 5.8 its pieces were named as BERT's."""

    name = "vit"
    layers = ("transformers.models.vit.modeling_vit.ViTLayer",)

    def self_attention(self, layer: Any) -> Any:
        return getattr(layer.attention, "attention", layer.attention)

    def parts(self, layer: Any) -> Parts:
        if hasattr(layer, "intermediate"):
            attn, norms = layer.attention.attention, ({"pre": layer.layernorm_before}, {"pre": layer.layernorm_after})
            return parts_named_as_here(layer, attn, attn.dropout_prob, *norms)
        attn, mlp = layer.attention, layer.mlp
        return Parts(
            Attention(
                heads=attn.num_attention_heads,
                kv_heads=attn.num_attention_heads,
                head_dim=attn.head_dim,
                q=attn.q_proj,
                k=attn.k_proj,
                v=attn.v_proj,
                o=attn.o_proj,
                pre=layer.layernorm_before,
                scale=attn.scaling,
                p_attn=attn.attention_dropout if attn.training else 0.0,
                p_res=rate(layer.dropout),
                holders=(attn, layer.dropout),
            ),
            FFN(
                mlp.activation_fn,
                gate=None,
                up=mlp.fc1,
                down=mlp.fc2,
                pre=layer.layernorm_after,
                p_res=rate(layer.dropout),
                holders=(mlp,),
            ),
        )


register(ViT())
