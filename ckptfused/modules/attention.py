"""The attention half of a block as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.masks import NO_MASK
from ckptfused.modules.assemble import (
    Call,
    attention_inputs,
    attention_reason,
    attention_slots,
    attention_words,
    canonical_text,
    input_words,
)
from ckptfused.modules.attention_layer import make_attention
from ckptfused.modules.fused import FusedModule, check_call, rates, refuse_generic, run_fused, run_generic
from ckptfused.modules.norms import make_norm
from ckptfused.spec import Keep
from ckptfused.spec.checks import check_flag, check_integer


class FusedCheckpointAttention(FusedModule):
    """The attention half of a block alone: norm, self-attention, dropout and residual in one op.

    `x + drop(attn(norm(x)))` with `norm_first`, `norm(x + drop(attn(x)))` without; `norm="none"` leaves it out.
    Submodules `self_attn`, `norm1`, `dropout1` carry the names that they have in `FusedCheckpointBlock`.
    `attention` takes the keywords of `make_attention`: num_kv_heads, head_dim, rope, rotary_dim, rope_style,
    qk_norm, causal, window, softcap, scale.

    **Shapes** src: [T, B, C], [B, T, C] with `batch_first`, or [T, C]; float64, float32, bfloat16, float16.
    **Saves** src, what `keep` names, 16 bytes of random state in training with dropout.
    **Recomputes** QKV and attention unless kept; O too where the closing norm needs it.
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came.
    **Source** `nn.TransformerEncoderLayer`, its `_sa_block`, norm and residual.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dropout: float = 0.1,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        norm: str = "layernorm",
        attention_dropout: float | None = None,
        residual_dropout: float | None = None,
        keep: Keep = "inputs",
        **attention: Any,
    ) -> None:
        super().__init__()
        d_model, bias = check_integer("d_model", d_model, 1), check_flag("bias", bias)
        p_attn, p_res = rates(dropout, attention_dropout=attention_dropout, residual_dropout=residual_dropout)
        self.self_attn = make_attention(
            d_model, nhead, p_attn, bias, batch_first, device, dtype, norm=norm, **attention
        )
        self.norm_first = check_flag("norm_first", norm_first)
        self.norm1 = None if norm == "none" else make_norm(norm, d_model, layer_norm_eps, bias, device, dtype)
        self.dropout1 = nn.Dropout(p_res)
        self.keep = keep

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The half's output; arguments as `FusedCheckpointBlock.forward`."""
        check_call(src, src_mask, src_key_padding_mask, cu_seqlens, rotary, generator)
        if (why := self.generic_reason(src_mask, src_key_padding_mask)) is not None:
            refuse_generic(why, cu_seqlens=cu_seqlens, rotary=rotary, generator=generator)
            return run_generic(self, self._plain, src, src_mask, src_key_padding_mask, is_causal)
        return run_fused(self, src, generator, src_mask, src_key_padding_mask, is_causal, cu_seqlens, rotary)

    def _unknown_layers(self) -> str | None:
        return attention_reason(self.self_attn, self.norm1, self.dropout1)

    def prepare(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Call:
        inputs = attention_inputs(self.self_attn, src, src_mask, src_key_padding_mask, is_causal, cu_seqlens, rotary)
        slots = attention_slots(self.self_attn, self.norm1, self._place, src)
        text = self._text(src, input_words(inputs.masks, cu_seqlens is not None))
        return Call("attention_block", inputs.x, slots, text, inputs.masks, inputs.cos, inputs.sin, cu_seqlens)

    @property
    def _place(self) -> str:
        return "pre" if self.norm_first else "out"

    def _text(self, x: Tensor, inputs: str = "") -> str:
        words = attention_words(self.self_attn, self.norm1, self._place, self.dropout1, x)
        causal = getattr(self.self_attn, "causal", False)
        inputs = inputs or input_words(NO_MASK._replace(causal=causal), False)
        seq_first = int(not self.self_attn.batch_first)
        return canonical_text(f"halves=attn seq_first={seq_first}{words}{inputs}", self._keep)

    def _plain(
        self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        norm = self.norm1 if self.norm1 is not None else nn.Identity()
        x = norm(src) if self.norm_first else src
        if is_causal and src_mask is None:
            length = src.size(-2 if self.self_attn.batch_first or src.dim() == 2 else 0)
            src_mask = nn.Transformer.generate_square_subsequent_mask(length, src.device, src.dtype)
        f = self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)[0]
        y = src + self.dropout1(f)
        return y if self.norm_first else norm(y)
