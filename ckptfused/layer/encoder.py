"""The halves of `nn.TransformerEncoderLayer`, and of what has its names: the decoder layer's, and the block's own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import MultiheadAttention

from ckptfused.layer.parts import FFN, Attention, child, weight
from ckptfused.layer.peft import adapted
from ckptfused.layer.projections import Projection, rate

ENCODER_NAMES = {
    "attn.pre": "norm1",
    "attn.out": "norm1",
    "attn.q": "self_attn.in_proj",
    "attn.q_w": "self_attn.in_proj_weight",
    "attn.q_b": "self_attn.in_proj_bias",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.o": "self_attn.out_proj",
    "attn.sinks": "self_attn.sinks",
    "attn.gate": "self_attn.gate_proj",
    "ffn.act": "activation",
    "ffn.pre": "norm2",
    "ffn.out": "norm2",
    "ffn.gate": "linear1",
    "ffn.up": "linear1",
    "ffn.down": "linear2",
}


def refuse_unread_adapter(attn: Any, why: str) -> None:
    """**Raises** `ValueError` where PyTorch's attention itself is to run and PEFT wraps its `out_proj`: it reads the
    weight there, past the adapter, which a fused call applies.
    """
    if type(attn) is MultiheadAttention and adapted(attn.out_proj):
        raise ValueError(
            "self_attn.out_proj: disable PEFT's adapter or merge it for this call. nn.MultiheadAttention itself runs "
            f"it, past the adapter; fused calls apply it, but this one is not fused ({why})"
        )


def attention(
    attn: Any, norm: Any, dropout: Any, norm_first: bool, holders: tuple[nn.Module, ...] = (), **variants: Any
) -> Attention:
    """The attention half around an `nn.MultiheadAttention`. variants: fields of `Attention` that it does not have."""
    heads = attn.num_heads
    fields: dict[str, Any] = {"kv_heads": heads, **variants}
    return Attention(
        heads=heads,
        head_dim=attn.head_dim,
        q=Projection(weight(attn, "in_proj_weight"), weight(attn, "in_proj_bias")),
        k=None,
        v=None,
        o=child(attn, "out_proj"),
        pre=norm if norm_first else None,
        out=None if norm_first else norm,
        p_attn=attn.dropout if attn.training else 0.0,
        p_res=rate(dropout),
        holders=holders,
        **fields,
    )


def ffn(layer: Any, norm: Any, dropout: Any, gated: bool = False, holders: tuple[nn.Module, ...] = ()) -> FFN:
    """The FFN half of a layer with `linear1`, `activation`, `dropout` and `linear2`.

    gated: `linear1` holds gate and up, and `activation` takes both.
    """
    first, down, norm_first = child(layer, "linear1"), child(layer, "linear2"), layer.norm_first
    return FFN(
        layer.activation,
        gate=first if gated else None,
        up=None if gated else first,
        down=down,
        pre=norm if norm_first else None,
        out=None if norm_first else norm,
        p_hidden=rate(child(layer, "dropout")),
        p_res=rate(dropout),
        holders=holders,
        hidden=down.in_features,
    )
