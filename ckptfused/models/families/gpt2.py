"""GPT-2: pre-norm LayerNorm, a joint projection, weights stored [in, out], dropout everywhere."""

from __future__ import annotations

from typing import Any

from ckptfused.compat.transformers import attention_implementation
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.projections import rate
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace


class GPT2(HuggingFace):
    """GPT-2 as a decoder. With cross-attention its layers are checkpointed."""

    name = "gpt2"
    layers = ("transformers.models.gpt2.modeling_gpt2.GPT2Block",)
    arguments = (
        *("hidden_states", "past_key_values", "attention_mask"),
        *("encoder_hidden_states", "encoder_attention_mask", "use_cache"),
    )

    def self_attention(self, layer: Any) -> Any:
        return layer.attn

    def parts(self, layer: Any) -> Parts:
        attn, mlp = layer.attn, layer.mlp
        first = Attention(
            heads=attn.num_heads,
            kv_heads=attn.num_heads,
            head_dim=attn.head_dim,
            q=attn.c_attn,
            k=None,
            v=None,
            o=attn.c_proj,
            pre=layer.ln_1,
            scale=_scale(attn),
            p_attn=attn.attn_dropout.p if attn.training else 0.0,
            p_res=rate(attn.resid_dropout),
            holders=(attn, attn.attn_dropout, attn.resid_dropout),
        )
        second = FFN(
            mlp.act, None, mlp.c_fc, mlp.c_proj, pre=layer.ln_2, p_res=rate(mlp.dropout), holders=(mlp, mlp.dropout)
        )
        return Parts(first, second)

    def inputs(self, layer: Any, *args: Any, **kwargs: Any) -> Inputs | Reason:
        if not hasattr(layer.attn, "scaling"):
            args = (*args[:2], *args[3:])  # without cache_position, which is there until transformers 5.3
        return super().inputs(layer, *args, **kwargs)

    def inputs_named(self, layer: Any, given: dict[str, Any]) -> Inputs | Reason:
        if given.get("encoder_hidden_states") is not None or hasattr(layer, "crossattention"):
            return Reason("cross-attention")
        if layer.attn.reorder_and_upcast_attn and attention_implementation(layer.attn.config) == "eager":
            return Reason("reorder_and_upcast_attn with eager attention")
        return super().inputs_named(layer, given)


def _scale(attn: Any) -> float | None:
    """Until transformers 5.3 only eager attention knows of the model's own scale."""
    if hasattr(attn, "scaling"):
        return attn.scaling
    if attention_implementation(attn.config) != "eager":
        return None
    scale = attn.head_dim**-0.5 if attn.scale_attn_weights else 1.0
    return scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale


register(GPT2())
