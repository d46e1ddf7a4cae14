"""LayerNorm, RMSNorm, each with a gain of 1 + w too (Nemotron, Gemma), and LayerScale, which is a gain alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """Normalise the last dimension of x, or scale it (LayerScale).

    **Shapes**: x [..., C]; weight, bias [C] or None, or, each batch element with its own, [B, 1, C]; returns x's shape.

    **Source**: ``F.layer_norm``; ``F.rms_norm``; gemma as in Hugging Face ``GemmaRMSNorm`` (float32 inside for the
    16-bit types, ``1 + weight`` applied before rounding); layernorm1p as ``NemotronLayerNorm1P``; layerscale as in
    timm's ``LayerScale``. kind ``"none"`` returns x.
    """
    width = x.shape[-1:]
    if kind == "none":
        return x
    if kind != "layerscale" and any(t is not None and t.dim() > 1 for t in (weight, bias)):
        y, plus = norm(x, None, None, kind, eps), kind in ("gemma", "layernorm1p")
        y = y if weight is None else y * (1 + weight if plus else weight)
        return (y if bias is None else y + bias).to(x.dtype)
    if kind == "layernorm1p":
        kind, weight = "layernorm", None if weight is None else 1 + weight
    if kind in ("layernorm", "rmsnorm"):
        wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))  # autocast: wider weights
        if kind == "layernorm":
            return F.layer_norm(wide, width, weight, bias, eps).to(x.dtype)
        y = F.rms_norm(wide, width, weight, eps)
        return (y if bias is None else y + bias).to(x.dtype)
    if kind == "gemma":
        wide = x if x.dtype == torch.float64 else x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            y = y * (1 + weight.to(wide.dtype))
        return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)
    if kind == "layerscale":
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide if weight is None else wide * weight.to(wide.dtype)).to(x.dtype)
    raise ValueError(f"kind: expected none, layernorm, rmsnorm, gemma, layernorm1p or layerscale, got {kind!r}")
