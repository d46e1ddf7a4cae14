"""OPT: LayerNorm before each half, or (350m) after it; separate projections; ReLU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason


class OPT(Family):
    """Both placements of the norms, with biases or without, norms with weights or without."""

    name = "opt"
    layers = ("transformers.models.opt.modeling_opt.OPTDecoderLayer",)

    def parts(self, layer: Any) -> Parts:
        attn = layer.self_attn
        place = "pre" if layer.do_layer_norm_before else "out"
        p_res = layer.dropout if layer.training else 0.0
        first = Attention(
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
        )
        second = FFN(layer.activation_fn, None, layer.fc1, layer.fc2, p_res=p_res)
        return Parts(
            first._replace(**{place: layer.self_attn_layer_norm}), second._replace(**{place: layer.final_layer_norm})
        )

    def inputs(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Inputs | Reason:
        attn, rest = layer.self_attn, {"position_ids": position_ids, **kwargs}
        return decoder_inputs(layer, attn, hidden_states, attention_mask, past_key_values, None, rest)


register(OPT())
