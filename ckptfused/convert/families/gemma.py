"""Gemma 2 and the text layers of Gemma 3: norms before and after both halves, alternating windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.convert.families.llama import attention, ffn, rotary_example
from ckptfused.convert.family import Family, register
from ckptfused.convert.hugging_face import decoder_inputs
from ckptfused.layer.parts import Inputs, Parts, Reason


class Gemma(Family):
    """Gemma 2 caps its logits; Gemma 3 has q/k norms instead, and no cap, whatever its configuration says."""

    name = "gemma"
    layers = (
        "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer",
        "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer",
    )

    def parts(self, layer: Any) -> Parts:
        attn = attention(layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm)
        return Parts(
            attn._replace(softcap=softcap(layer.self_attn)),
            ffn(layer.mlp, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm),
        )

    def inputs(
        self,
        layer: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Inputs | Reason:
        attn, cap = layer.self_attn, softcap(layer.self_attn)
        if cap is not None and (cap <= 0 or attn.config._attn_implementation == "sdpa"):
            return Reason(f"attention with soft-cap {cap} in {attn.config._attn_implementation}")
        rest = {"position_ids": position_ids, **kwargs}
        return decoder_inputs(layer, attn, hidden_states, attention_mask, past_key_values, position_embeddings, rest)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), rotary_example(layer.self_attn.head_dim, x)


def softcap(attn: Any) -> float | None:
    """The cap of the logits. Gemma 3's attention has q/k norms and the attribute too, but does not use it."""
    return None if hasattr(attn, "q_norm") else attn.attn_logit_softcapping


register(Gemma())
