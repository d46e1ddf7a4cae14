"""What a module with attention was called with, in the block's terms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptfused.checks import check_devices, check_input, check_packed, check_plain
from ckptfused.layer.call import learned
from ckptfused.layer.mask_patterns import by_place
from ckptfused.layer.parts import Inputs, Reason, child
from ckptfused.masks import encoder_mask


def attention_inputs(
    module: Any,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Inputs | Reason:
    """The method `inputs` of modules with `self_attn`; x is made 3-d. **Raises** `ValueError` or `TypeError`."""
    if (why := learned((src_mask, src_key_padding_mask), rotary or ())) is not None:
        return why
    attn = child(module, "self_attn")
    check_input(src, attn.embed_dim, "src")
    time, batch = (1, 0) if attn.batch_first else (0, 1)
    x = src.unsqueeze(batch) if src.dim() == 2 else src
    length = x.size(time)
    check_devices(x, src_mask=src_mask, src_key_padding_mask=src_key_padding_mask, cu_seqlens=cu_seqlens)
    causal = getattr(attn, "causal", False)
    hint = is_causal or (causal and src_mask is None)  # it takes the place of src_mask
    masks = encoder_mask(src_mask, src_key_padding_mask, hint, x.size(batch), attn.num_heads, length)
    if src_mask is not None and cu_seqlens is None and not getattr(attn, "window", 0):
        masks = by_place(masks, length, module)
    if causal and not masks.causal:
        masks = masks._replace(causal=True)
    if cu_seqlens is not None:
        if not attn.batch_first:
            raise ValueError("cu_seqlens: expected a batch_first=True module, got batch_first=False")
        check_packed(x, cu_seqlens, masks)
    table = attn._modules.get("rotary")
    cos = sin = None
    if rotary is not None:
        if table is None:
            raise ValueError("rotary: leave it out, for this module has no rope")
        cos, sin = rotary
        check_devices(x, cos=cos, sin=sin)
    elif table is not None:
        # Hooks on it turn the module generic.
        cos, sin = table.forward(length, x) if cu_seqlens is None else table.packed(cu_seqlens, length, x)
    return Inputs(x, masks, cos, sin, cu_seqlens, own_tables=rotary is None, seq_first=not attn.batch_first)


def check_modulation(block: Any, src: Any, modulation: Any) -> None:
    """**Raises** `ValueError` or `TypeError` unless a modulated block, and no other, is given its vectors."""
    if not block.modulated:
        if modulation is not None:
            raise ValueError("modulation: leave it out, for this block is not modulated (modulated=False)")
        return
    check_modulated(block.parallel, block.norm_first, block.self_attn.batch_first)
    check_plain("src", src)
    check_plain("modulation", modulation)
    if src.dim() != 3 or modulation.shape != (src.size(0), 6, src.size(2)):
        given = f"{list(modulation.shape)} beside {list(src.shape)}"
        raise ValueError(f"modulation: expected shape [B, 6, C] beside src [B, T, C], got {given}")
    if not modulation.is_floating_point():
        raise TypeError(f"modulation: expected a floating-point tensor, got {modulation.dtype}")
    check_devices(src, modulation=modulation)


def check_modulated(parallel: Any, norm_first: bool, batch_first: bool) -> None:
    """**Raises** `ValueError` where a block that is so cannot be modulated."""
    if parallel or not norm_first or not batch_first:
        raise ValueError("modulated: expected norm_first=True, batch_first=True and parallel=False")


def vectors_of(modulation: Tensor) -> dict[str, Tensor]:
    """The slots of a modulated block's vectors. **Shapes** modulation [B, 6, C]; each [B, C]."""
    shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation.unbind(1)
    attn = {"attn.pre_w": 1 + scale, "attn.pre_b": shift, "attn.post_w": gate}
    return {**attn, "ffn.pre_w": 1 + scale_ff, "ffn.pre_b": shift_ff, "ffn.post_w": gate_ff}
