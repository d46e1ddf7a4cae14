"""GPT-2: pre-norm LayerNorm, a joint projection, weights stored [in, out], dropout everywhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.pieces import rate


class GPT2(Family):
    """GPT-2 as a decoder. With cross-attention its layers are checkpointed."""

    name = "gpt2"
    layers = ("transformers.models.gpt2.modeling_gpt2.GPT2Block",)

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

    def inputs(
        self,
        layer: Any,
        hidden_states: Tensor,
        past_key_values: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Inputs | Reason:
        if not hasattr(layer.attn, "scaling"):
            rest = rest[1:]  # cache_position, until transformers 5.3
        return _inputs(layer, hidden_states, past_key_values, *rest, **kwargs)


def _inputs(
    layer: Any,
    hidden_states: Tensor,
    past_key_values: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    use_cache: Any = False,
    **kwargs: Any,
) -> Inputs | Reason:
    if encoder_hidden_states is not None or hasattr(layer, "crossattention"):
        return Reason("cross-attention")
    if layer.attn.reorder_and_upcast_attn and layer.attn.config._attn_implementation == "eager":
        return Reason("reorder_and_upcast_attn with eager attention")
    return decoder_inputs(layer, layer.attn, hidden_states, attention_mask, past_key_values, None, kwargs)


def _scale(attn: Any) -> float | None:
    """Until transformers 5.3 only eager attention knows of the model's own scale."""
    if hasattr(attn, "scaling"):
        return attn.scaling
    if attn.config._attn_implementation != "eager":
        return None
    scale = attn.head_dim**-0.5 if attn.scale_attn_weights else 1.0
    return scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale


register(GPT2())
