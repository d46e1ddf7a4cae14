"""What all adapters of Hugging Face decoders share: masks of every attention implementation, caches, outputs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ckptfused.convert.parts import Inputs, Reason
from ckptfused.masks import Mask

# Those whose mask forms are known: 4-d additive, 4-d boolean or none, 2-d padding or none.
_FLASH = ("flash_attention_2", "flash_attention_3")
IMPLEMENTATIONS = ("eager", "sdpa", *_FLASH)


def collecting() -> bool:
    """Whether Hugging Face collects what only the original layer makes: attention weights, router logits."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collected = capturing and capturing._active_collector.get()
    return bool(collected) and any(not key.startswith(("hidden_states", "_")) for key in collected)


def cache_reason(layer: Any, cache: Any) -> Reason | None:
    """Why a call with this key/value cache runs the original forward; None where it is fused without the cache.

    In training an empty cache is left empty, as Hugging Face does under checkpointing.
    """
    if cache is None:
        return None
    if torch.is_grad_enabled() and layer.training and cache.get_seq_length() == 0:
        return None
    return Reason("a key/value cache is in use", original=True)


def attention_mask(mask: Any, length: int, causal: bool) -> Mask | Reason:
    """The mask that a layer was given, in the block's terms."""
    if mask is None:
        return Mask(causal=causal)
    if not isinstance(mask, Tensor):
        return Reason(f"attention mask of type {type(mask).__name__} (FlexAttention)")
    if mask.requires_grad:
        return Reason("the attention mask needs a gradient")
    if mask.dim() == 4:
        if mask.size(-1) != length or mask.size(-2) not in (1, length):
            return Reason(f"attention mask of shape {list(mask.shape)} for {length} tokens", original=True)
        return Mask(mask, "keep" if mask.dtype == torch.bool else "add")
    if mask.dim() == 2 and mask.size(-1) == length:
        return Mask(padding=mask.bool(), padding_kind="keep", causal=causal)
    return Reason(f"attention mask of shape {list(mask.shape)}")


def decoder_inputs(
    layer: Any,
    attention: Any,
    hidden_states: Tensor,
    mask: Any,
    cache: Any,
    position_embeddings: tuple[Tensor, Tensor] | None,
    kwargs: dict[str, Any],
) -> Inputs | Reason:
    """The inputs of a decoder layer whose attention module follows Hugging Face's interface."""
    if kwargs.get("output_attentions") or collecting():
        return Reason("attention weights or router logits are asked for", original=True)
    if (why := cache_reason(layer, cache)) is not None:
        return why
    implementation = attention.config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        return Reason(f"attention implementation {implementation!r}")
    causal = kwargs.get("is_causal")
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    length = hidden_states.size(1)
    masks = attention_mask(mask, length, bool(causal))
    if isinstance(masks, Reason):
        return masks
    cos, sin = (None, None) if position_embeddings is None else position_embeddings
    cu_seqlens = None
    if implementation in _FLASH:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        packed = kwargs.get("position_ids") is not None and hidden_states.size(0) == 1
        if mask is None and cu_seqlens is None and packed:
            return Reason("flash attention may find packed sequences in position_ids: pass cu_seq_lens_q")
    return Inputs(hidden_states, masks, cos, sin, cu_seqlens)
