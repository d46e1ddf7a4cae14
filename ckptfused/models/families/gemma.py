"""Gemma 2 and the text layers of Gemma 3: norms before and after both halves, alternating windows."""

from __future__ import annotations

from typing import Any

from ckptfused.compat.transformers import attention_implementation
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.models.families.llama import attention, ffn
from ckptfused.models.family import register
from ckptfused.models.hugging_face import HuggingFace


class Gemma(HuggingFace):
    """Gemma 2 caps its logits; Gemma 3 has q/k norms instead, and no cap, whatever its configuration says."""

    name = "gemma"
    layers = (
        "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer",
        "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer",
    )
    arguments = ("hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values")

    def parts(self, layer: Any) -> Parts:
        attn = attention(layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm)
        return Parts(
            attn._replace(softcap=softcap(layer.self_attn)),
            ffn(layer.mlp, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm),
        )

    def inputs_named(self, layer: Any, given: dict[str, Any]) -> Inputs | Reason:
        attn, cap = layer.self_attn, softcap(layer.self_attn)
        if cap is not None and (cap <= 0 or attention_implementation(attn.config) == "sdpa"):
            return Reason(f"attention with soft-cap {cap} in {attention_implementation(attn.config)}")
        return super().inputs_named(layer, given)


def softcap(attn: Any) -> float | None:
    """The cap of the logits. Gemma 3's attention has q/k norms and the attribute too, but does not use it."""
    return None if hasattr(attn, "q_norm") else attn.attn_logit_softcapping


register(Gemma())
