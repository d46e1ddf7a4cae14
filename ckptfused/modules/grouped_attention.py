"""`nn.MultiheadAttention`'s parameters and names, for the head layouts and variants that it lacks."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import MultiheadAttention
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ckptfused.eager.attention import attention
from ckptfused.eager.philox import DECISIONS, keep_threshold
from ckptfused.eager.rope import rope
from ckptfused.layer.norms import make_norm
from ckptfused.layer.parts import child
from ckptfused.layer.sdpa import refuse_replaced_sdpa
from ckptfused.masks import encoder_mask
from ckptfused.modules.rotary import RotaryTable
from ckptfused.spec import OUTPUT_GATES
from ckptfused.spec.checks import check_at_least, check_choice, check_flag, check_integer, check_number


class GroupedAttention(nn.MultiheadAttention):
    """Self-attention with grouped key/value heads, any head width, RoPE, q/k norm, window, soft-cap, sinks and a gate.

    A holder of parameters: `in_proj_weight` is [(H+2G)·D, C], `out_proj` maps H·D to C. The fused modules read
    them; `forward` is plain PyTorch, for the layers that cannot be fused, and holds the T × T matrix.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: RotaryTable | None = None,
        rope_style: str = "half",
        qk_norm: str = "none",
        qk_eps: float = 1e-6,
        causal: bool = False,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        output_gate: str = "none",
        scale: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self._qkv_same_embed_dim = True
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.rope_style = rope_style
        self.causal = causal
        self.window = window
        self.softcap = softcap
        self.scale = scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = num_heads * head_dim
        total = width + 2 * self.num_kv_heads * head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(total, embed_dim, **factory))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(total, **factory)) if bias else None)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v"):
            self.register_parameter(name, None)
        self.add_zero_attn = False
        self.output_gate = output_gate
        self.gate_proj: nn.Linear | None = None
        if output_gate != "none":
            self.gate_proj = nn.Linear(embed_dim, width if output_gate == "entry" else num_heads, bias, **factory)
        self.sinks: Tensor | None
        self.register_parameter("sinks", nn.Parameter(torch.empty(num_heads, **factory)) if sinks else None)
        self.out_proj = NonDynamicallyQuantizableLinear(width, embed_dim, bias=bias, **factory)
        self.q_norm = self.k_norm = None
        if qk_norm != "none":
            self.q_norm = make_norm(qk_norm, head_dim, qk_eps, bias, device, dtype, "qk_norm")
            self.k_norm = make_norm(qk_norm, head_dim, qk_eps, bias, device, dtype, "qk_norm")
        self.rotary = rotary
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Self-attention of `query`; `key` and `value` are taken to be the same tensor.

        **Shapes** as `nn.MultiheadAttention`. **Saves** what autograd saves, T × T included.
        **Raises** `ValueError`, `TypeError` for masks of a wrong shape or type; `RuntimeError` where
        `F.scaled_dot_product_attention`, which is not called, is not PyTorch's own.
        """
        refuse_replaced_sdpa("self_attn")
        x = query if query.dim() == 3 else query.unsqueeze(0 if self.batch_first else 1)
        x = x if self.batch_first else x.transpose(0, 1)
        B, T, H, G, D = x.size(0), x.size(1), self.num_heads, self.num_kv_heads, self.head_dim
        masks = encoder_mask(attn_mask, key_padding_mask, is_causal, B, H, T)
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (H + 2 * G, D))
        q, k, v = qkv.split([H, G, G], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary(T, q)
            q, k = (rope(t, cos, sin, self.rope_style, self.rotary.dim) for t in (q, k))
        keep = None
        if self.training and self.dropout:
            keep = torch.rand(B, H, T, T, device=x.device) >= keep_threshold(self.dropout) / DECISIONS
        o, _ = attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            mask=masks.mask,
            mask_kind=masks.kind,
            padding=masks.padding,
            padding_kind=masks.padding_kind,
            scale=self.scale,
            causal=masks.causal or self.causal,
            window=self.window,
            softcap=self.softcap,
            keep=keep,
            p=self.dropout,
            sinks=self.sinks,
        )
        o = o.transpose(1, 2)
        if self.gate_proj is not None:
            o = o * torch.sigmoid(self.gate_proj(x)).unflatten(-1, (H, -1))
        y = self.out_proj(o.flatten(2))
        y = y if self.batch_first else y.transpose(0, 1)
        return (y if query.dim() == 3 else y.squeeze(0 if self.batch_first else 1)), None

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def variants(self) -> dict[str, Any]:
        """The fields of `layer.parts.Attention` that `nn.MultiheadAttention` has not, as they are now."""
        rotary = child(self, "rotary")
        return {
            "kv_heads": self.num_kv_heads,
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "rope": "none" if rotary is None else self.rope_style,
            "rotary_dim": 0 if rotary is None else rotary.dim,
            "scale": self.scale,
            "softcap": self.softcap,
            "window": self.window,
            "sinks": self.sinks,
            "gate": child(self, "gate_proj"),
            "output_gate": self.output_gate,
        }

    def extra_repr(self) -> str:
        words = [f"{self.embed_dim}, heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"]
        for name in ("causal", "window", "softcap", "scale", "dropout"):
            if getattr(self, name):
                words.append(f"{name}={getattr(self, name)}")
        words += ["sinks"] if self.sinks is not None else []
        words += [f"output_gate={self.output_gate}"] if self.gate_proj is not None else []
        return ", ".join(words)


def has_fast_path(attention: nn.MultiheadAttention) -> bool:
    """Whether PyTorch's own fast path computes this attention."""
    return type(attention) is MultiheadAttention


def make_attention(
    d_model: int,
    nhead: int,
    dropout: float,
    bias: bool,
    batch_first: bool,
    device: Any,
    dtype: Any,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope: bool | float | RotaryTable | None = False,
    rope_style: str = "half",
    rotary_dim: int | None = None,
    qk_norm: str | bool = "none",
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    output_gate: str | None = None,
    scale: float | None = None,
    norm: str = "layernorm",
    **unknown: Any,
) -> nn.MultiheadAttention:
    """PyTorch's own layer where it can hold the parameters, else a `GroupedAttention`.

    `rope` is True (theta 10000), a theta, a `RotaryTable` to share, or False or None for no RoPE; `qk_norm` a kind,
    or True for the block's; `sinks` True for a trained logit of each head beside those of the keys; `output_gate`
    "entry" or "head" for sigmoids of a projection that multiply each entry, or each head, of the result. **Raises**
    `ValueError` or `TypeError` for what attention cannot be made of, unknown keywords included.
    """
    if unknown:
        raise TypeError(
            f"{next(iter(unknown))}: unknown keyword; beside those of the signature, attention takes num_kv_heads, "
            "head_dim, rope, rope_style, rotary_dim, qk_norm, causal, window, softcap, sinks, output_gate and scale"
        )
    nhead = check_integer("nhead", nhead, 1)
    if head_dim is not None:
        head_dim = check_integer("head_dim", head_dim, 1)
    elif d_model % nhead:
        raise ValueError(f"nhead: expected a divisor of d_model={d_model} (or pass head_dim=), got {nhead}")
    extras: dict[str, Any] = {}
    if num_kv_heads is not None and nhead % check_integer("num_kv_heads", num_kv_heads, 1):
        raise ValueError(f"num_kv_heads: expected a divisor of nhead={nhead}, got {num_kv_heads}")
    if num_kv_heads not in (None, nhead):
        extras["num_kv_heads"] = int(num_kv_heads)
    if head_dim is not None and head_dim * nhead != d_model:
        extras["head_dim"] = head_dim
    kind = (norm if qk_norm else "none") if isinstance(qk_norm, bool) else qk_norm
    if kind != "none":
        extras["qk_norm"] = kind
    rotary = _rotary(rope, rope_style, rotary_dim, head_dim or d_model // nhead)
    if rotary is not None:
        extras |= {"rotary": rotary, "rope_style": rope_style}
    extras |= {name: True for name, on in (("causal", causal), ("sinks", sinks)) if check_flag(name, on)}
    if output_gate is not None and output_gate != "none":
        check_choice("output_gate", output_gate, OUTPUT_GATES)
        extras["output_gate"] = output_gate
    extras |= _numbers(window, softcap, scale)
    batch_first = check_flag("batch_first", batch_first)
    args: dict[str, Any] = {"dropout": dropout, "bias": bias, "batch_first": batch_first}
    if not extras and d_model % nhead == 0:
        return nn.MultiheadAttention(d_model, nhead, **args, device=device, dtype=dtype)
    return GroupedAttention(d_model, nhead, **args, device=device, dtype=dtype, **extras)


def _numbers(window: int | None, softcap: float | None, scale: float | None) -> dict[str, Any]:
    """What window, soft-cap and scale say beside the defaults."""
    said: dict[str, Any] = {}
    if window is not None and check_integer("window", window, 0):
        said["window"] = int(window)
    if softcap is not None and check_at_least("softcap", softcap, 0.0):
        said["softcap"] = float(softcap)
    if scale is not None:
        if not check_number("scale", scale):
            raise ValueError("scale: expected a number other than 0, or None for 1/sqrt(head_dim), got 0")
        said["scale"] = float(scale)
    return said


def _rotary(rope: Any, style: str, rotary_dim: int | None, head_dim: int) -> RotaryTable | None:
    """The table that `rope` asks for."""
    check_choice("rope_style", style, ("half", "interleaved"))
    if rope is None or rope is False:
        if rotary_dim is not None:
            raise ValueError(f"rotary_dim: pass rope= with it, or leave it out, got {rotary_dim} without rope")
        return None
    width = head_dim if rotary_dim is None else check_integer("rotary_dim", rotary_dim, 2)
    if isinstance(rope, RotaryTable):
        width = rope.dim
    elif rope is not True and (isinstance(rope, str) or not isinstance(rope, numbers.Real)):
        raise TypeError(f"rope: expected True, False, None, a theta or a RotaryTable, got {rope!r}")
    if width > head_dim:
        raise ValueError(f"rotary_dim: expected at most head_dim={head_dim}, got {width}")
    return rope if isinstance(rope, RotaryTable) else RotaryTable(width, 1e4 if rope is True else rope)
