"""What all adapters of Hugging Face decoders share: masks of every attention implementation, caches, outputs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ckptfused.convert.parts import Inputs, Reason
from ckptfused.masks import Mask

# Those whose mask forms are known: 4-d additive; 4-d boolean or none (causal); 2-d padding or none (causal).
_FLASH = ("flash_attention_2", "flash_attention_3")
IMPLEMENTATIONS = ("eager", "sdpa", *_FLASH)
# What callers may hand to the attention functions themselves, through every layer's **kwargs.
_CHANGES_ATTENTION = ("position_bias", "s_aux", "softcap", "cache")


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


def is_cache(value: Any) -> bool:
    """Whether an argument is one of Hugging Face's key/value caches."""
    caches: Any = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def own_window(attention: Any, window: int | None) -> int | None:
    """The sliding window where the attention function applies it itself: only flash attention's does.

    Eager attention and SDPA know the window by their mask alone; SDPA goes without a mask where the sequence is no
    longer than the window.
    """
    return window if attention.config._attn_implementation in _FLASH else None


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
    if any(kwargs.get(name) is not None for name in _CHANGES_ATTENTION):
        return Reason("an argument of the attention function is given")
    flash = implementation in _FLASH
    if isinstance(mask, Tensor) and (mask.dim() == 2) is not flash:
        return Reason(f"{implementation} attention with a mask of {mask.dim()} dimensions")
    causal = kwargs.get("is_causal")
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    # Eager attention without a mask hides nothing, whatever the module says.
    masks = attention_mask(mask, hidden_states.size(1), bool(causal) and implementation != "eager")
    if isinstance(masks, Reason):
        return masks
    cos, sin = (None, None) if position_embeddings is None else position_embeddings
    cu_seqlens = None
    if flash:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        packed = kwargs.get("position_ids") is not None and hidden_states.size(0) == 1
        if mask is None and cu_seqlens is None and packed:
            return Reason("flash attention may find packed sequences in position_ids: pass cu_seq_lens_q")
    return Inputs(hidden_states, masks, cos, sin, cu_seqlens)
