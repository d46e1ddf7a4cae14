"""T5: the FFN half is fused, attention, whose relative position bias needs a gradient, is checkpointed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptfused.layer.parts import FFN, Inputs, Parts, Reason
from ckptfused.layer.projections import rate
from ckptfused.models.cache_arguments import cache_reason, to_fill
from ckptfused.models.family import Family, register
from ckptfused.models.hugging_face import collecting
from ckptfused.models.steps import Fused, Generic, Steps


class T5(Family):
    """T5, encoder and decoder, FFN gated or not. One checkpointed piece holds self- and cross attention."""

    name = "t5"
    layers = ("transformers.models.t5.modeling_t5.T5Block",)

    def parts(self, layer: Any) -> Parts:
        half = layer.layer[-1]
        dense = half.DenseReluDense
        gated = hasattr(dense, "wi_0")
        return Parts(
            ffn=FFN(
                dense.act,
                gate=dense.wi_0 if gated else None,
                up=dense.wi_1 if gated else dense.wi,
                down=dense.wo,
                pre=half.layer_norm,
                p_hidden=rate(dense.dropout),
                p_res=rate(half.dropout),
                holders=(half, dense, dense.dropout, half.dropout),
            )
        )

    def steps(
        self,
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        encoder_decoder_position_bias: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Steps | Reason:
        if kwargs.get("output_attentions") or collecting(layer):
            return Reason("attention weights are asked for", original=True)
        if (why := cache_reason(layer, past_key_values, layer.layer[0].SelfAttention.layer_idx)) is not None:
            return why
        if hidden_states.dtype == torch.float16:
            return Reason("values are clamped in float16")
        masks = (attention_mask, position_bias, encoder_hidden_states)
        cross = (encoder_attention_mask, encoder_decoder_position_bias)
        kwargs["past_key_values"] = to_fill(past_key_values)
        why_not = "attention whose position bias needs a gradient"
        return (
            Generic(why_not, partial(_attend, layer), (*masks, *cross), kwargs),
            Fused(self.parts(layer), Inputs(hidden_states)),
        )

    def result(self, y: Tensor, *rest: Any) -> tuple[Any, ...]:
        return y, *rest

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), {"encoder_hidden_states": torch.empty_like(x)} if layer.is_decoder else {}


def _attend(
    layer: Any,
    x: Tensor,
    mask: Any,
    position_bias: Any,
    encoder_hidden_states: Any,
    encoder_mask: Any,
    encoder_position_bias: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """x, and the position biases that later layers use. Until transformers 5.14, None does not stand for one."""
    x, position_bias, *weights = layer.layer[0](x, attention_mask=mask, position_bias=position_bias, **kwargs)
    if not layer.is_decoder or encoder_hidden_states is None:
        return (x, position_bias, None) if weights else (x, position_bias)
    x, encoder_position_bias, *_ = layer.layer[1](
        x,
        key_value_states=encoder_hidden_states,
        attention_mask=encoder_mask,
        position_bias=encoder_position_bias,
        **kwargs,
    )
    return x, position_bias, encoder_position_bias


register(T5())
