"""The attention half of a block as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Dropout, MultiheadAttention

from ckptfused.compat.torch_modules import projects_alike
from ckptfused.layer import encoder
from ckptfused.layer.hooks import watched
from ckptfused.layer.norms import make_norm
from ckptfused.layer.parts import Attention, Parts, Reason, child
from ckptfused.modules.fused import FusedModule, another, rates, run_module
from ckptfused.modules.grouped_attention import GroupedAttention, make_attention
from ckptfused.modules.inputs import attention_inputs
from ckptfused.spec import Keep
from ckptfused.spec.checks import check_flag, check_integer

# As they are now: a subclass that somebody puts in their place in torch.nn may compute something else.
_ATTENTION, _DROPOUT = (MultiheadAttention, GroupedAttention), (Dropout,)


def attention_parts(layer: Any) -> Attention | Reason:
    """The attention half of a module with `self_attn`, `norm1` and `dropout1`."""
    attn, dropout = child(layer, "self_attn"), child(layer, "dropout1")
    why = another(_ATTENTION, self_attn=attn) or another(_DROPOUT, dropout1=dropout)
    if why is not None:
        return why
    if not projects_alike(attn) or attn.bias_k is not None or attn.add_zero_attn:
        return Reason("self_attn has keys and values of another width, bias_k or add_zero_attn")
    variants: dict[str, Any] = {}
    if type(attn) is GroupedAttention:
        table = child(attn, "rotary")
        if table is not None and (why := watched(table, "self_attn.rotary")) is not None:
            return why
        variants = attn.variants()
    return encoder.attention(attn, child(layer, "norm1"), dropout, layer.norm_first, **variants)


class FusedCheckpointAttention(FusedModule):
    """The attention half of a block alone: norm, self-attention, dropout and residual in one op.

    `x + drop(attn(norm(x)))` with `norm_first`, `norm(x + drop(attn(x)))` without; `norm="none"` leaves it out, and
    `residual=False` the sum with x, for a model that adds it itself.
    Submodules `self_attn`, `norm1`, `dropout1` carry the names that they have in `FusedCheckpointBlock`.
    `attention` takes the keywords of `make_attention`: num_kv_heads, head_dim, rope, rotary_dim, rope_style,
    qk_norm, causal, window, softcap, sinks, output_gate, scale.

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
        residual: bool = True,
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
        self.residual = check_flag("residual", residual)
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
        masks, beside = (src_mask, src_key_padding_mask, is_causal), {"cu_seqlens": cu_seqlens, "rotary": rotary}
        return run_module(self, self._plain, generator, src, *masks, **beside)

    def parts(self) -> Parts | Reason:
        attn = attention_parts(self)
        return (
            attn
            if isinstance(attn, Reason)
            else Parts(
                attn._replace(residual=self.residual), width=self.self_attn.embed_dim, names=encoder.ENCODER_NAMES
            )
        )

    inputs = attention_inputs

    def _plain(
        self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        x = self.norm1(src) if self.norm_first and self.norm1 is not None else src
        if is_causal and src_mask is None:
            length = src.size(-2 if self.self_attn.batch_first or src.dim() == 2 else 0)
            src_mask = nn.Transformer.generate_square_subsequent_mask(length, src.device, src.dtype)
        f = self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal)[0]
        y = src + self.dropout1(f) if self.residual else self.dropout1(f)
        return y if self.norm_first or self.norm1 is None else self.norm1(y)
