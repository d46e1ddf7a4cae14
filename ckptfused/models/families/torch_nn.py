"""`torch.nn`'s Transformer layers: joint qkv, pre- or post-norm, either layout. Cross attention is checkpointed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.torch_modules import DECODER_PARTS, ENCODER_HALVES, cross_attention, projects_alike
from ckptfused.layer import encoder
from ckptfused.layer.activations import coefficients_of
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.layer.peft import adapted
from ckptfused.layer.spec_text import Mode
from ckptfused.masks import encoder_mask
from ckptfused.models.family import Family, Outcome, register
from ckptfused.models.steps import Fused, Generic, Steps

_MODULES = "torch.nn.modules.transformer"


class _Torch(Family):
    """What both layers share."""

    given: str
    """The name of x among the forward's arguments."""

    def run(self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, y = args[0] if args else kwargs[self.given], super().run(layer, mode, args, kwargs)
        # One sequence without a batch dimension comes back without one.
        return y.view(x.shape) if isinstance(y, Tensor) and x.dim() == 2 else y

    def refuse_original(self, layer: Any, why: str) -> None:
        encoder.refuse_unread_adapter(layer.self_attn, why)

    def outcome(self, layer: Any, mode: Mode) -> Outcome | Reason:
        return _with_adapters(layer, super().outcome(layer, mode))


class TorchEncoder(_Torch):
    """`nn.TransformerEncoderLayer`. Its fast path in evaluation, and nested tensors, stay PyTorch's."""

    name, given = "torch_encoder", "src"
    layers = (f"{_MODULES}.TransformerEncoderLayer",)
    methods = ("forward", *ENCODER_HALVES)

    def parts(self, layer: Any) -> Parts:
        return halves(layer, layer.norm2, layer.dropout2)

    def inputs(
        self,
        layer: Any,
        src: Tensor,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Inputs | Reason:
        # PyTorch's fast path reads weights past PEFT's adapters.
        if not (layer.training or torch.is_grad_enabled() or _adapted(layer)):
            return Reason("evaluation without gradients", original=True)
        inputs = inputs_of(layer.self_attn, src, src_mask, src_key_padding_mask, is_causal)
        return inputs if isinstance(inputs, Reason) else inputs._replace(vectors=coefficients_of(layer.activation))

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (_laid_out(layer, x),), {}


class TorchDecoder(_Torch):
    """`nn.TransformerDecoderLayer`."""

    name, given = "torch_decoder", "tgt"
    layers = (f"{_MODULES}.TransformerDecoderLayer",)
    methods = ("forward", *DECODER_PARTS)

    def parts(self, layer: Any) -> Parts:
        return halves(layer, layer.norm3, layer.dropout3)

    def steps(
        self,
        layer: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Steps | Reason:
        inputs = inputs_of(layer.self_attn, tgt, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        if isinstance(inputs, Reason):
            return inputs
        parts = self.parts(layer)
        cross = partial(_cross, layer, tgt.dim() == 2)
        encoder = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        return (
            Fused(Parts(attn=parts.attn), inputs),
            Generic("cross attention", cross, encoder),
            Fused(
                Parts(ffn=parts.ffn),
                Inputs(inputs.x, seq_first=inputs.seq_first, vectors=coefficients_of(layer.activation)),
            ),
        )

    def example(self, layer: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = _laid_out(layer, x)
        return (x, torch.empty_like(x)), {}


def _adapted(layer: Any) -> bool:
    """Whether PEFT's adapters are beside a weight that PyTorch's fast path reads."""
    return any(map(adapted, (layer.linear1, layer.linear2, layer.self_attn.out_proj)))


def _with_adapters(layer: Any, found: Outcome | Reason) -> Outcome | Reason:
    """The outcome, with what to say of PEFT's adapters beside an `out_proj`: PyTorch's attention reads past them."""
    said = {
        "self_attn": "the adapter of self_attn.out_proj is applied, which nn.MultiheadAttention would leave out",
        "multihead_attn": "nn.MultiheadAttention leaves the adapter of multihead_attn.out_proj out",
    }
    notes = [text for name, text in said.items() if hasattr(layer, name) and adapted(getattr(layer, name).out_proj)]
    if isinstance(found, Reason) or not notes:
        return found
    return found._replace(reason="; ".join(filter(None, (found.reason, *notes))))


def halves(layer: Any, norm: Any, dropout: Any) -> Parts:
    """Self-attention and FFN of a layer. norm, dropout: those of the FFN half."""
    attn, dropout1 = layer.self_attn, layer.dropout1
    return Parts(
        encoder.attention(attn, layer.norm1, dropout1, layer.norm_first, (attn, dropout1)),
        encoder.ffn(layer, norm, dropout, holders=(layer.dropout, dropout)),
    )


def inputs_of(attn: Any, x: Tensor, mask: Any, padding: Any, is_causal: bool) -> Inputs | Reason:
    """What a self-attention half was called with. What PyTorch refuses, or takes another way, is left to it."""
    if x.is_nested:
        return Reason("a nested tensor", original=True)
    if not projects_alike(attn) or attn.bias_k is not None or attn.add_zero_attn:
        return Reason("keys or values of another width, or added ones")
    if x.dim() not in (2, 3) or x.size(-1) != attn.embed_dim or (is_causal and mask is None):
        return Reason("PyTorch refuses this call", original=True)
    if any(m is not None and m.requires_grad for m in (mask, padding)):
        return Reason("a mask needs a gradient")
    if x.dim() == 2:
        x = x.unsqueeze(0 if attn.batch_first else 1)
    batch, length = (0, 1) if attn.batch_first else (1, 0)
    try:
        # Beside padding PyTorch takes the mask itself, not the hint that it is causal.
        hint = is_causal and padding is None
        masks = encoder_mask(mask, padding, hint, x.size(batch), attn.num_heads, x.size(length))
    except (TypeError, ValueError) as error:
        return Reason(str(error), original=True)
    return Inputs(x, masks, seq_first=not attn.batch_first)


def _cross(layer: Any, unbatched: bool, x: Tensor, memory: Tensor, mask: Any, padding: Any, is_causal: bool) -> Tensor:
    batch = 0 if layer.self_attn.batch_first else 1
    x = x.squeeze(batch) if unbatched else x
    if layer.norm_first:
        x = x + cross_attention(layer, layer.norm2(x), memory, mask, padding, is_causal)
    else:
        x = layer.norm2(x + cross_attention(layer, x, memory, mask, padding, is_causal))
    return x.unsqueeze(batch) if unbatched else x


def _laid_out(layer: Any, x: Tensor) -> Tensor:
    return x if layer.self_attn.batch_first else x.detach().view(x.size(1), 1, -1).requires_grad_()


register(TorchEncoder())
register(TorchDecoder())
