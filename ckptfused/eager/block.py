"""The whole block, or one of its halves, for every setting of a BlockSpec."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import COEFFICIENTS_SLOT, FIRST_SITE, AttentionSpec, BlockSpec, FFNSpec, adapter_input
from .activation import activation
from .attention import attention
from .dropout import dropout
from .norm import norm
from .philox import philox_mask
from .rope import rope

Params = Mapping[str, Tensor | None]
KeepMasks = Mapping[str, Tensor]


def _linear(x: Tensor, params: Params, name: str, spec: AttentionSpec | FFNSpec, keep: KeepMasks) -> Tensor:
    """The projection `name` ("attn.q") of x with its adapters, each of which has a keep mask by its name if p > 0."""
    weight, bias = params.get(f"{name}_w"), params.get(f"{name}_b")
    assert weight is not None, f"{name}_w is missing"
    y = result = F.linear(x, weight.t() if spec.transposed else weight, bias)
    half, target = name.split(".")
    for index, adapter in enumerate(spec.lora):
        if adapter.target != target:
            continue
        slots = f"{half}.lora{index}"
        a, b = params[f"{slots}.a"], params[f"{slots}.b"]
        assert a is not None and b is not None
        low = F.linear(dropout(x.to(a.dtype), keep.get(slots), adapter.p), a)
        result = result + F.linear(low, b, params.get(f"{slots}.bias")) * adapter.scale
    return result.to(y.dtype)


def _norm(x: Tensor, params: Params, name: str, kind: str, eps: float) -> Tensor:
    w, b = (_by_batch(params.get(f"{name}_{which}")) for which in "wb")
    return norm(x, w, b, kind, eps)


def _by_batch(vector: Tensor | None) -> Tensor | None:
    return vector[:, None] if vector is not None and vector.dim() == 2 else vector


def _lengths(cu_seqlens: Tensor | None, tokens: int) -> list[tuple[int, int]]:
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    return list(pairwise(bounds))


def _adapter_masks(keep: Mapping[int, Tensor], name: str, spec: BlockSpec) -> KeepMasks:
    """The masks of one half's adapters by name."""
    first = 4 if name == "attn" or spec.attn is None else 4 + len(spec.attn.lora)
    return {f"{name}.lora{site - first}": mask for site, mask in keep.items() if site >= first}


def mask_shapes(
    spec: BlockSpec, batch: int, tokens: int, width: int, cu_seqlens: Tensor | None = None
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """p and the shape of the mask of every site with p > 0, by site number.

    Site 0: [B, H, T, T] (packed: [S, H, longest, longest]), 1 and 3: [B, T, C], 2: [B, T, F], from 4 on one for each
    adapter, of the shape of its projection's input.
    """
    wanted: dict[int, tuple[float, tuple[int, ...]]] = {}
    if spec.attn is not None:
        spans = _lengths(cu_seqlens, tokens)
        longest = max((end - start for start, end in spans), default=0)
        count = batch if cu_seqlens is None else len(spans)
        wanted[0] = (spec.attn.p_attn, (count, spec.attn.heads, longest, longest))
        wanted[1] = (spec.attn.p_res, (batch, tokens, width))
    if spec.ffn is not None:
        wanted[2] = (spec.ffn.p_hidden, (batch, tokens, spec.ffn.hidden))
        wanted[3] = (spec.ffn.p_res, (batch, tokens, width))
    for site, (prefix, adapter) in enumerate(spec.adapters.items(), FIRST_SITE):
        wanted[site] = (adapter.p, (batch, tokens, adapter_input(spec, prefix, width)))
    return {site: (p, shape) for site, (p, shape) in wanted.items() if p > 0}


def dropout_masks(
    spec: BlockSpec, batch: int, tokens: int, width: int, rng_state: Tensor | None, cu_seqlens: Tensor | None = None
) -> dict[int, Tensor]:
    """The keep mask of every site of `mask_shapes`, by site number. **Shapes**: rng_state int64 [2] (seed, offset)."""
    wanted = mask_shapes(spec, batch, tokens, width, cu_seqlens)
    if not wanted:
        return {}
    if rng_state is None:
        raise ValueError("rng_state: expected an int64[2] tensor for a spec with dropout, got None")
    seed, offset = rng_state.tolist()
    return {site: philox_mask(shape, p, seed, offset, site) for site, (p, shape) in wanted.items()}


def qkv(
    x: Tensor, params: Params, spec: AttentionSpec, cos: Tensor | None, sin: Tensor | None, adapter_keep: KeepMasks
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v after q/k norm and RoPE, and the gate before its sigmoid.

    **Shapes**: x [B, T, C]; returns [B, H, T, D], twice [B, G, T, D], and [B, T, H, D] or [B, T, H, 1].
    """
    h, g, d = spec.heads, spec.kv_heads, spec.head_dim
    gate: Tensor | None = None
    if spec.interleaved:
        heads = list(_linear(x, params, "attn.q", spec, adapter_keep).view(*x.shape[:-1], h, 3 * d).chunk(3, -1))
    else:
        if spec.joint:
            parts = list(_linear(x, params, "attn.q", spec, adapter_keep).split((h * d, g * d, g * d), -1))
        else:
            parts = [_linear(x, params, f"attn.{name}", spec, adapter_keep) for name in "qkv"]
        if spec.gate_in_q:
            q, gate = parts[0].unflatten(-1, (h, 2, d)).unbind(-2)
            parts[0] = q.flatten(-2)
        heads = [part.unflatten(-1, (-1, d)) for part in parts]
    if spec.output_gate != "none" and not spec.gate_in_q:
        gate = _linear(x, params, "attn.gate", spec, adapter_keep).unflatten(-1, (h, -1))
    heads[2] = norm(heads[2], None, None, spec.v_norm, spec.v_eps)
    for index, name in enumerate("qk"):
        normed = (params, f"attn.{name}_norm", spec.qk_norm, spec.qk_eps)
        if spec.qk_place == "row":
            heads[index] = _norm(heads[index].flatten(-2), *normed).unflatten(-1, (-1, d))
        elif spec.qk_place == "head":
            heads[index] = _norm(heads[index], *normed)
        if spec.rope != "none":
            assert cos is not None and sin is not None, "rope: cos and sin are missing"
            heads[index] = rope(heads[index], cos, sin, spec.rope, spec.rotary_dim)
        if spec.qk_place == "turned":
            heads[index] = _norm(heads[index], *normed)
    return [head.transpose(1, 2) for head in heads], gate


def attention_branch(
    x: Tensor,
    params: Params,
    spec: AttentionSpec,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    padding: Tensor | None,
    cu_seqlens: Tensor | None,
    q_scale: Tensor | None,
    keep: Tensor | None,
    adapter_keep: KeepMasks,
    eager: bool,
) -> Tensor:
    """The attention half's f: projections, attention inside each sequence, output projection. [B, T, C] both ways."""
    (q, k, v), gate = qkv(x, params, spec, cos, sin, adapter_keep)
    q = q if q_scale is None else q * q_scale[..., None, :, None].to(q.dtype)
    outputs = []
    for index, (start, end) in enumerate(_lengths(cu_seqlens, x.shape[1])):
        length = end - start
        if length == 0:
            continue
        part_keep = keep
        if keep is not None and cu_seqlens is not None:
            part_keep = keep[index : index + 1, :, :length, :length]
        o, _ = attention(
            *(value[:, :, start:end] for value in (q, k, v)),
            mask=mask,
            mask_kind=spec.mask,
            padding=padding,
            padding_kind=spec.padding,
            scale=spec.scale,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            keep=part_keep,
            p=spec.p_attn,
            sinks=params.get("attn.sinks"),
            fused=eager,
        )
        outputs.append(o)
    o = (torch.cat(outputs, 2) if outputs else q).transpose(1, 2)  # without tokens q is as empty as o
    o = (o if gate is None else o * torch.sigmoid(gate)).flatten(-2)
    return _linear(o, params, "attn.o", spec, adapter_keep)


def ffn_branch(x: Tensor, params: Params, spec: FFNSpec, keep: Tensor | None, adapter_keep: KeepMasks) -> Tensor:
    """The FFN half's f: up (and gate), activation, dropout, down. [B, T, C] both ways."""
    gate = None
    if spec.gated:
        gate = _linear(x, params, "ffn.gate", spec, adapter_keep)
        if spec.joint:
            gate, up = gate.chunk(2, -1)
        else:
            up = _linear(x, params, "ffn.up", spec, adapter_keep)
    else:
        up = _linear(x, params, "ffn.up", spec, adapter_keep)
    h = dropout(activation(gate, up, spec.act, params.get(COEFFICIENTS_SLOT)), keep, spec.p_hidden)
    return _linear(h, params, "ffn.down", spec, adapter_keep)


def _branch_tail(f: Tensor, params: Params, name: str, spec: AttentionSpec | FFNSpec, keep: Tensor | None) -> Tensor:
    f = dropout(_norm(f, params, f"{name}.post", spec.post, spec.post_eps), keep, spec.p_res)
    return f if spec.m == 1.0 else f * spec.m


def eager_block(
    x: Tensor,
    params: Params,
    spec: BlockSpec,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_scale: Tensor | None = None,
    rng_state: Tensor | None = None,
    masks: Mapping[int, Tensor] | None = None,
    eager: bool = False,
) -> Tensor:
    """What a fused block computes, in plain PyTorch: half(x) = out?(x + m drop(post?(f(pre?(x))))) twice, or parallel.

    Run in float64 it is the truth; in a tensor's own type with ``eager=True`` (PyTorch's attention kernel where it
    can be used) it is the baseline whose error sets the tolerance.

    **Shapes**: x [B, T, C], with ``spec.seq_first`` [T, B, C], packed [1, N, C]; params by name (``"attn.q_w"``);
    cos, sin [T, r] or [B, T, r]; mask broadcastable to [B, H, T, T]; padding [B, T]; cu_seqlens int [S + 1];
    q_scale [T] or [B, T]; rng_state int64 [2]; masks overrides the keep masks that rng_state gives, by site. Returns
    x's shape.
    """
    if spec.seq_first:
        x = x.transpose(0, 1)
    batch, tokens, width = x.shape
    keep = masks if masks is not None else dropout_masks(spec, batch, tokens, width, rng_state, cu_seqlens)

    def attend(value: Tensor) -> Tensor:
        assert spec.attn is not None
        aux = {"cos": cos, "sin": sin, "mask": mask, "padding": padding, "cu_seqlens": cu_seqlens}
        aux["q_scale"] = q_scale
        own = _adapter_masks(keep, "attn", spec)
        f = attention_branch(value, params, spec.attn, **aux, keep=keep.get(0), adapter_keep=own, eager=eager)
        return _branch_tail(f, params, "attn", spec.attn, keep.get(1))

    def feed_forward(value: Tensor) -> Tensor:
        assert spec.ffn is not None
        f = ffn_branch(value, params, spec.ffn, keep.get(2), _adapter_masks(keep, "ffn", spec))
        return _branch_tail(f, params, "ffn", spec.ffn, keep.get(3))

    def entry(value: Tensor, name: str, half: AttentionSpec | FFNSpec) -> Tensor:
        return _norm(value, params, f"{name}.pre", half.pre, half.pre_eps)

    def closing(value: Tensor, name: str, half: AttentionSpec | FFNSpec) -> Tensor:
        return _norm(value, params, f"{name}.out", half.out, half.out_eps)

    if spec.parallel:
        assert spec.attn is not None and spec.ffn is not None
        first = entry(x, "attn", spec.attn)
        second = first if spec.parallel == "shared" else entry(x, "ffn", spec.ffn)
        y = x + attend(first) + feed_forward(second)
    else:
        y = x
        for name, half, branch in (("attn", spec.attn, attend), ("ffn", spec.ffn, feed_forward)):
            if half is not None:
                f = branch(entry(y, name, half))
                y = closing(y + f if half.residual else f, name, half)
    return y.transpose(0, 1) if spec.seq_first else y
