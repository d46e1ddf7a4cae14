"""A fused call that hands on its keys and values, as somebody's key/value cache takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused import outer_checkpoint, rng
from ckptfused.eager.norm import norm
from ckptfused.eager.rope import rope
from ckptfused.functional import compute_word
from ckptfused.masks import NO_MASK, Mask
from ckptfused.spec import PARAM_SLOTS, parse


class Result(NamedTuple):
    """**Shapes** y: as x. k, v: [B, G, T, D], after k norm and RoPE, in the type of the products; k in that of wider
    rotary tables.
    """

    y: Tensor
    k: Tensor
    v: Tensor


def run_with_keys(
    op: str,
    x: Tensor,
    slots: Sequence[Tensor | None],
    text: str,
    masks: Mask = NO_MASK,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Result:
    """`functional.run` of `block` or `attention_block` without gradients: the same bits and the same draw, and what its
    attention made of x beside.
    """
    text, draws = _keeping_qkv(text + compute_word(x))
    if draws:
        generator = outer_checkpoint.source(x, generator)
    state = rng.state(x, generator) if draws else None
    ops = torch.ops.ckptfused
    forward = ops.block_fwd if op == "block" else ops.attention_block_fwd
    aux = [cos, sin, masks.mask, masks.padding, cu_seqlens]
    y, qkv = forward(x, slots, aux, state, text, True)
    return Result(y, *_keys_and_values(qkv, slots, text, cos, sin))


@torch.compiler.assume_constant_result
def _keeping_qkv(text: str) -> tuple[str, bool]:
    """The text of a spec that keeps nothing but the QKV product, and whether it draws."""
    spec = parse(text, ("qkv",))
    return spec.to_string(), spec.has_dropout


@torch.compiler.assume_constant_result
def _layout(text: str) -> tuple[int, int, int, bool, bool, str, float, str, int]:
    spec = parse(text)
    a = spec.attn
    assert a is not None
    heads = (a.heads, a.kv_heads, a.head_dim, a.interleaved)
    return *heads, spec.seq_first, a.qk_norm, a.qk_eps, a.rope, a.rotary_dim


def _keys_and_values(
    qkv: Tensor, slots: Sequence[Tensor | None], text: str, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """From the raw product [B, T, (H+2G)·D]."""
    h, g, d, interleaved, seq_first, kind, eps, turning, width = _layout(text)
    qkv = qkv.transpose(0, 1) if seq_first else qkv
    if interleaved:
        _, k, v = qkv.unflatten(-1, (h, 3, d)).unbind(-2)
    else:
        _, k, v = qkv.unflatten(-1, (h + 2 * g, d)).split((h, g, g), -2)
    weight, bias = (slots[PARAM_SLOTS["attn"].index(f"k_norm_{part}")] for part in "wb")
    k = norm(k, weight, bias, kind, eps)
    if cos is not None and sin is not None:
        k = rope(k.to(torch.promote_types(k.dtype, cos.dtype)), cos, sin, turning, width)  # wider under autocast
    return k.transpose(1, 2), v.transpose(1, 2)
