"""BERT and RoBERTa: post-norm LayerNorm, separate weights, residuals added in modules of their own."""

from __future__ import annotations

from typing import Any

from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.projections import rate
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace

_MODELS = "transformers.models"


class Bert(HuggingFace):
    """BERT, RoBERTa. Chunks of the FFN (`chunk_size_feed_forward`) give what the whole gives: they are not made."""

    name = "bert"
    layers = (
        f"{_MODELS}.bert.modeling_bert.BertLayer",
        f"{_MODELS}.roberta.modeling_roberta.RobertaLayer",
    )
    methods = ("forward", "feed_forward_chunk")
    arguments = (
        *("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
    )

    def self_attention(self, layer: Any) -> Any:
        return layer.attention.self

    def parts(self, layer: Any) -> Parts:
        attn = layer.attention.self
        first, last = layer.attention.output, layer.output
        return Parts(
            Attention(
                heads=attn.num_attention_heads,
                kv_heads=attn.num_attention_heads,
                head_dim=attn.attention_head_size,
                q=attn.query,
                k=attn.key,
                v=attn.value,
                o=first.dense,
                scale=attn.scaling,
                p_attn=attn.dropout.p if attn.training else 0.0,
                p_res=rate(first.dropout),
                holders=(layer.attention, attn, first, first.dropout),
                out=first.LayerNorm,
            ),
            FFN(
                layer.intermediate.intermediate_act_fn,
                gate=None,
                up=layer.intermediate.dense,
                down=last.dense,
                p_res=rate(last.dropout),
                holders=(layer.intermediate, last, last.dropout),
                out=last.LayerNorm,
            ),
        )

    def inputs_named(self, layer: Any, given: dict[str, Any]) -> Inputs | Reason:
        if layer.is_decoder and given.get("encoder_hidden_states") is not None:
            return Reason("cross attention")
        return super().inputs_named(layer, given)


register(Bert())
