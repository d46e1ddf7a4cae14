"""The keys and values of a fused call, from its QKV product, as somebody's key/value cache takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ckptfused.compat.torch_compile import constant_result
from ckptfused.eager.norm import norm
from ckptfused.eager.rope import rope
from ckptfused.spec import PARAM_SLOTS, parse


@constant_result
def keeping_qkv(text: str) -> tuple[str, bool]:
    """The text of a spec that keeps nothing but the QKV product, and whether it draws."""
    spec = parse(text, ("qkv",))
    return spec.to_string(), spec.has_dropout


@constant_result
def _layout(text: str) -> tuple[int, int, int, bool, bool, str, float, str, str, int, str, float]:
    spec = parse(text)
    a = spec.attn
    assert a is not None
    heads = (a.heads, a.kv_heads, a.head_dim, a.interleaved)
    return *heads, spec.seq_first, a.qk_norm, a.qk_eps, a.qk_place, a.rope, a.rotary_dim, a.v_norm, a.v_eps


def keys_and_values(
    qkv: Tensor, slots: Sequence[Tensor | None], text: str, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """k, after its norm and RoPE, and v, after its norm, of a call that was made with these slots and tables.

    **Shapes** qkv: the raw product [B, T, (H+2G)·D]. Results: [B, G, T, D], in the type of the product; k in that of
    wider rotary tables.
    """
    h, g, d, interleaved, seq_first, kind, eps, place, turning, width, v_kind, v_eps = _layout(text)
    qkv = qkv.transpose(0, 1) if seq_first else qkv
    if interleaved:
        _, k, v = qkv.unflatten(-1, (h, 3, d)).unbind(-2)
    else:
        _, k, v = qkv.unflatten(-1, (h + 2 * g, d)).split((h, g, g), -2)
    weight, bias = (slots[PARAM_SLOTS["attn"].index(f"k_norm_{part}")] for part in "wb")
    if place == "row":
        k = norm(k.flatten(-2), weight, bias, kind, eps).unflatten(-1, (g, d))
    elif place == "head":
        k = norm(k, weight, bias, kind, eps)
    if cos is not None and sin is not None:
        k = rope(k.to(torch.promote_types(k.dtype, cos.dtype)), cos, sin, turning, width)  # wider under autocast
    if place == "turned":
        k = norm(k, weight, bias, kind, eps)
    return k.transpose(1, 2), norm(v, None, None, v_kind, v_eps).transpose(1, 2)
