"""The block and its two halves as functions of tensors.

`params` maps slot names (`"attn.q_w"`, `"ffn.down_b"`, …: see `ckptfused.spec.param_names`) to tensors; slots
that a block does not use are left out or None. These functions check what they are given and call one op.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ckptfused.checks import (
    check_devices,
    check_dtype,
    check_factors,
    check_generator,
    check_input,
    check_packed,
    check_param,
    check_stored,
    rotary_view,
)
from ckptfused.compat.torch_compile import constant_result
from ckptfused.masks import NO_MASK, sdpa_mask
from ckptfused.ops.call import Call
from ckptfused.spec import PROJECTION_SLOTS, BlockSpec, param_names, param_shapes, parse, quantized_slots, shape_in

__all__ = ["attention_block", "block", "ffn_block"]


@constant_result
def variant_text(text: str, mask_kind: str, padding_kind: str, packed: bool) -> str:
    """The text of a spec called with these inputs. From text to text, so that torch.compile can fold it."""
    return parse(text, inputs=(mask_kind, padding_kind, packed)).to_string()


def block(
    x: Tensor,
    params: Mapping[str, Tensor | None],
    spec: BlockSpec,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A transformer block that saves its input and rebuilds the rest in backward.

    **Shapes** x: [B, T, C] ([T, B, C] with `spec.seq_first`) or, for one sequence, [T, C]; float64, float32,
    bfloat16 or float16. Result: as x. params: `ckptfused.spec.param_shapes(spec, C)`; projections in x's
    dtype (any floating dtype under autocast or with `spec.compute`), norm weights and adapters in any.
    cos, sin: [T, r] or [B, T, r], r the rotary width or half of it. mask: broadcastable to [B, H, T, T], bool
    (True may be attended to) or floating (added to the logits; -5e8 or less hides, as -inf does).
    padding: [B, T], bool (True: a real token) or floating. A spec that says `mask="drop"` or `padding="drop"`
    turns the meaning of bool round.
    cu_seqlens: int32 or int64 [S+1], the bounds of S sequences packed in x [1, N, C]: numbers that do not fall, from
    0 to N. The CPU refuses others; on CUDA, where looking would wait for the device, the caller answers for them.
    q_scale: [T] or [B, T], with `spec.attn.q_scale`: q after its norm and RoPE is multiplied by them. No gradient.
    generator: the source of dropout's seed; None: PyTorch's default generator.
    **Saves** x, the values in `spec.keep`, and 16 bytes of random state where some p > 0; references to
    params, cos, sin, masks, cu_seqlens and q_scale, which the caller owns.
    **Recomputes** in backward what `spec.keep` leaves out of QKV, attention, O, gate/up (never the last GEMM of
    a pre-norm block).
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came.
    **Source** docs/how-it-works.md, "One block": `y = out_norm?(x + m · drop(post_norm?(f(pre_norm?(x)))))` per half.
    """
    return _call("block", x, params, spec, cos, sin, mask, padding, cu_seqlens, q_scale, generator)


def attention_block(
    x: Tensor,
    params: Mapping[str, Tensor | None],
    spec: BlockSpec,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The attention half of a block alone, its residual included where `spec.attn.residual`.

    **Shapes** as `block`; spec has an attention half and no FFN half.
    **Saves** as `block`. **Recomputes** QKV and attention; O too where a closing or post norm needs its result.
    **Raises** as `block`; `ValueError` if spec has an FFN half.
    **Source** Vaswani et al. 2017, equation 1 and section 3.2.2, with the variants of `AttentionSpec`.
    """
    if isinstance(spec, BlockSpec) and (spec.attn is None or spec.ffn is not None):
        raise ValueError(f"spec: expected an attention half alone, got '{spec.to_string()}'")
    return _call("attention_block", x, params, spec, cos, sin, mask, padding, cu_seqlens, q_scale, generator)


def ffn_block(
    x: Tensor,
    params: Mapping[str, Tensor | None],
    spec: BlockSpec,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The FFN half of a block alone, its residual included where `spec.ffn.residual`.

    **Shapes** as `block`; spec has an FFN half and no attention half.
    **Saves** as `block`. **Recomputes** gate/up; down too where a closing or post norm needs its result.
    **Raises** as `block`; `ValueError` if spec has an attention half.
    **Source** Vaswani et al. 2017, equation 2; gated kinds: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """
    if isinstance(spec, BlockSpec) and (spec.ffn is None or spec.attn is not None):
        raise ValueError(f"spec: expected an FFN half alone, got '{spec.to_string()}'")
    return _call("ffn_block", x, params, spec, None, None, None, None, None, None, generator)


def _call(
    op: str,
    x: Tensor,
    params: Mapping[str, Tensor | None],
    spec: BlockSpec,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    padding: Tensor | None,
    cu_seqlens: Tensor | None,
    q_scale: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    if not isinstance(spec, BlockSpec):
        raise TypeError(f"spec: expected a BlockSpec (BlockSpec.parse makes one of its text), got {spec!r}")
    if not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping from slot names to tensors, got {type(params).__name__}")
    slots = _check_params(x, params, spec)
    check_generator(generator)
    unbatched = x.dim() == 2
    time, batch = (0, 1) if spec.seq_first else (1, 0)
    if unbatched:
        x = x.unsqueeze(batch)
    masks = NO_MASK
    text = spec.to_string()
    if spec.attn is not None:
        check_devices(x, mask=mask, padding=padding, cos=cos, sin=sin, cu_seqlens=cu_seqlens, q_scale=q_scale)
        masks = sdpa_mask(mask, padding, x.size(batch), spec.attn.heads, x.size(time))
        if cu_seqlens is not None:
            check_packed(x, cu_seqlens, masks)
        kind = _given_kind("mask", spec.attn.mask, masks.kind)
        padding_kind = _given_kind("padding", spec.attn.padding, masks.padding_kind)
        if (kind, padding_kind, cu_seqlens is not None) != (spec.attn.mask, spec.attn.padding, spec.attn.packed):
            text = variant_text(text, kind, padding_kind, cu_seqlens is not None)
        if (spec.attn.rope != "none") != (cos is not None) or (cos is None) != (sin is None):
            raise ValueError(
                f"cos, sin: expected {'both' if spec.attn.rope != 'none' else 'neither'} with "
                f"rope={spec.attn.rope!r}, got cos {_describe(cos)} and sin {_describe(sin)}"
            )
        if cos is not None and sin is not None:
            cos = rotary_view("cos", cos, x.size(batch), x.size(time), spec.attn.rotary)
            sin = rotary_view("sin", sin, x.size(batch), x.size(time), spec.attn.rotary)
        check_factors(q_scale, spec.attn.q_scale, x.size(batch), x.size(time))
    elif any(t is not None for t in (mask, padding, cu_seqlens, cos, sin, q_scale)):
        names = "mask, padding, cu_seqlens, cos, sin, q_scale"
        raise ValueError(f"{names}: leave them out, for the spec has no attention half")
    y = Call(op, x, slots, text, masks, cos, sin, cu_seqlens, q_scale=q_scale).run(generator)
    return y.squeeze(batch) if unbatched else y


def _describe(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _given_kind(name: str, declared: str, found: str) -> str:
    """The kind that the op is told: what the spec declares where the tensor fits, else what the tensor is."""
    if declared == "none" or declared == found or (declared == "drop" and found == "keep"):
        return found if declared == "none" else declared
    raise ValueError(f"{name}: expected a mask of the spec's kind {declared!r}, got {found!r}")


def _check_params(x: Tensor, params: Mapping[str, Tensor | None], spec: BlockSpec) -> list[Tensor | None]:
    """The parameters in slot order."""
    names = param_names(spec)
    for name in params:
        if name not in names:
            raise ValueError(f"params: unknown slot {name!r}; expected names among {', '.join(names)}")
    width = _width(x, params, spec)
    check_input(x, width)
    shapes, stored = param_shapes(spec, width), quantized_slots(spec)
    slots: list[Tensor | None] = []
    for name in names:
        value = params.get(name)
        slots.append(value)
        if name not in shapes:
            if value is not None:
                raise ValueError(
                    f"params[{name!r}]: expected None for spec '{spec.to_string()}', got {_describe(value)}"
                )
            continue
        shape, required = shapes[name]
        if value is None:
            if required:
                raise ValueError(f"params[{name!r}]: expected a tensor of shape {list(shape)}, got None")
            continue
        if name in stored:
            check_stored(f"params[{name!r}]", value, shape[0], x)
            continue
        check_param(f"params[{name!r}]", value, shape_in(shape, x.size(0) if x.dim() == 3 else 1), x)
        if name in PROJECTION_SLOTS:
            check_dtype(f"params[{name!r}]", value, x, spec.compute)
    return slots


def _width(x: Tensor, params: Mapping[str, Tensor | None], spec: BlockSpec) -> int:
    """C, read off the weight of the last projection, or off x where that is stored in few bits."""
    half, name = (spec.attn, "attn.o_w") if spec.ffn is None else (spec.ffn, "ffn.down_w")
    if name in quantized_slots(spec) and isinstance(x, Tensor) and x.dim():
        return x.size(-1)
    weight = params.get(name)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(f"params[{name!r}]: expected a matrix, got {_describe(weight)}")
    assert half is not None
    return weight.size(1 if half.transposed else 0)
