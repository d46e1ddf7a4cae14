"""What all adapters of Hugging Face's layers share: arguments, masks of every attention implementation, caches."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_modules import forward_hooks
from ckptfused.compat.transformers import attention_function, attention_implementation, collects, output_collector
from ckptfused.layer.parts import Inputs, Reason
from ckptfused.masks import Mask
from ckptfused.models.cache_arguments import CACHES, cache_reason, keeper
from ckptfused.models.family import Family
from ckptfused.sizes import counted

# Those whose mask forms are known: 4-d additive, 4-d boolean or none, 2-d padding or none.
FLASH_WITH_SINKS = ("flash_attention_4", "kernels-community/vllm-flash-attn3")
FLASH = ("flash_attention_2", "flash_attention_3", *FLASH_WITH_SINKS)
IMPLEMENTATIONS = ("eager", "sdpa", *FLASH)
# By these a caller reaches into the attention function.
_FOREIGN = ("position_bias", "softcap", "s_aux", "sliding_window", "cache", "block_table")
# Without one of them flash attention looks for packed sequences itself.
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def collecting(layer: nn.Module, made: tuple[str, ...] = ()) -> bool:
    """Whether Hugging Face collects what only the original layer makes: attention weights, router logits.

    made: what the fused layer's own submodules make too, since it calls them.
    """
    collector = output_collector()
    if collector is None:
        return False
    # In a layer compiled by itself Dynamo cannot read that context variable. Without a hook that collects, nothing is
    # collected; with one, the original layer reads it as well. Other hooks, such as FSDP's, have no part in it.
    alone = torch.compiler.is_compiling() and not collector.compiling
    if alone and not any(collects(hook) for module in layer.modules() for hook in forward_hooks(module).values()):
        return False
    collected = collector.get()
    return bool(collected) and any(not key.startswith(("hidden_states", "_", *made)) for key in collected)


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
            return Reason(f"attention mask of shape {list(mask.shape)} for {counted(length, 'token')}", original=True)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            return Reason(f"attention mask of type {mask.dtype}")
        return Mask(mask, "keep" if mask.dtype == torch.bool else "add")
    if mask.dim() == 2 and mask.size(-1) == length:
        return Mask(padding=mask.bool(), padding_kind="keep", causal=causal)
    return Reason(f"attention mask of shape {list(mask.shape)}")


class HuggingFace(Family):
    """An adapter of layers whose self-attention module follows Hugging Face's interface. Subclasses say `parts`."""

    arguments: tuple[str, ...] = ("hidden_states", "attention_mask")
    """The arguments that the layer's forward takes by place, in its order."""
    made: tuple[str, ...] = ()
    """The names of values that the layer makes for its caller, as in `collecting`."""

    def self_attention(self, layer: Any) -> Any:
        """The module of the layer that follows that interface."""
        return layer.self_attn

    def inputs(self, layer: Any, *args: Any, **kwargs: Any) -> Inputs | Reason:
        if len(args) > len(self.arguments):
            return Reason(f"{counted(len(args), 'argument')} by place, more than were read")
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        if "hidden_states" not in given:
            return Reason("there are no hidden_states", original=True)
        return self.inputs_named(layer, given)

    def inputs_named(self, layer: Any, given: dict[str, Any]) -> Inputs | Reason:
        """The layer's inputs, of arguments by name."""
        return layer_inputs(layer, self.self_attention(layer), given, self.made)

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        turned = "position_embeddings" in self.arguments
        return (x,), rotary_example(layer.self_attn.head_dim, x) if turned else {}


def rotary_example(width: int, x: Tensor) -> dict[str, Any]:
    """Rotary tables as the models hand them to their layers."""
    table = x.detach().new_ones(1, x.size(1), width)
    return {"position_embeddings": (table, table)}


def layer_inputs(layer: Any, attention: Any, given: dict[str, Any], made: tuple[str, ...] = ()) -> Inputs | Reason:
    """What a layer was given, by name, in the block's terms. attention: its self-attention; made: as `collecting`."""
    hidden_states, mask = given["hidden_states"], given.get("attention_mask")
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    if given.get("output_attentions") or collecting(layer, made):
        return Reason("attention weights or router logits are asked for", original=True)
    index = getattr(attention, "layer_idx", None)
    if (why := cache_reason(layer, cache, index)) is not None:
        return why
    implementation = attention_implementation(attention.config)
    if implementation not in IMPLEMENTATIONS or _replaced(implementation):
        return Reason(f"attention implementation {implementation!r}")
    for name in _FOREIGN:
        if given.get(name) is not None:
            return Reason(f"the argument {name}")
    flash = implementation in FLASH
    causal = given.get("is_causal")
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    # Eager attention sees what the mask lets it see, and no less.
    masks = attention_mask(mask, hidden_states.size(1), bool(causal) and implementation != "eager")
    if isinstance(masks, Reason):
        return masks
    if (masks.mask is None if not flash else masks.mask is not None) and mask is not None:
        return Reason(f"attention mask of shape {list(mask.shape)} for {implementation}")
    cos, sin = given.get("position_embeddings") or (None, None)
    cu_seqlens = packed_bounds(hidden_states, given) if flash and mask is None else None
    if isinstance(cu_seqlens, Reason):
        return cu_seqlens
    # A window is flash attention's own affair, part of the mask elsewhere.
    keys = None if cache is None else keeper(cache, index)
    return Inputs(hidden_states, masks, cos, sin, cu_seqlens, windowed=flash, keep_keys=keys)


def _replaced(implementation: str) -> bool:
    """Whether somebody registered an attention function of theirs by this name."""
    function = attention_function(implementation)
    function = getattr(function, "func", function)  # a kernel from the hub is in a partial of transformers' own
    return function is not None and not function.__module__.startswith("transformers.")


def packed_bounds(x: Tensor, given: dict[str, Any]) -> Tensor | Reason | None:
    """The bounds of packed sequences as flash attention finds them; None: there is one sequence in each row."""
    positions = given.get("position_ids")
    if all(given.get(name) is not None for name in _VARLEN):
        bounds = given["cu_seq_lens_q"]
        return bounds if x.size(0) == 1 else Reason("sequences packed in several rows")
    if positions is None or x.size(0) != 1 or x.size(1) == 1:
        return None
    if torch.compiler.is_compiling():
        return Reason("flash attention looks for packed sequences in position_ids: pass cu_seq_lens_q and the like")
    return _latest.bounds(positions, x.size(1))


class _LatestPositions(threading.local):
    """The bounds in the position_ids that this thread saw last: every layer of a step is given the same ones, and
    looking into them makes the host wait for the GPU."""

    positions: weakref.ref[Tensor] | None = None
    state: tuple[int, int] | None = None  # version and tokens
    found: Tensor | Reason | None = None

    def bounds(self, positions: Tensor, tokens: int) -> Tensor | Reason | None:
        if positions.is_inference():  # changes of it leave no trace
            return _bounds(positions, tokens)
        state = (positions._version, tokens)
        if self.positions is None or self.positions() is not positions or self.state != state:
            self.found = _bounds(positions, tokens)
            self.positions, self.state = weakref.ref(positions), state
        return self.found


_latest = _LatestPositions()


def _bounds(positions: Tensor, tokens: int) -> Tensor | Reason | None:
    positions = positions.reshape(-1)
    first = positions.min()
    if torch.equal(positions, first + torch.arange(tokens, device=positions.device, dtype=positions.dtype)):
        return None
    starts = (positions == first).nonzero().view(-1)
    if positions.numel() != tokens or starts[0] != 0:
        return Reason("position_ids do not say where packed sequences begin")
    return torch.cat((starts, starts.new_tensor([tokens]))).int()
