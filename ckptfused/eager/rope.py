"""Rotary position embedding, half-split and interleaved, full or partial."""

from __future__ import annotations

import torch
from torch import Tensor


def half_width(table: Tensor, kind: str, rotary_dim: int) -> Tensor:
    """The first of each repeated entry of a cos or sin table: [..., rotary_dim / 2], whichever width came."""
    if table.shape[-1] == rotary_dim // 2:
        return table
    if table.shape[-1] != rotary_dim:
        raise ValueError(f"cos/sin: expected last size {rotary_dim // 2} or {rotary_dim}, got {table.shape[-1]}")
    return table[..., : rotary_dim // 2] if kind == "half" else table[..., ::2]


def rope(x: Tensor, cos: Tensor, sin: Tensor, kind: str, rotary_dim: int = 0) -> Tensor:
    """Rotate the first rotary_dim entries (0: all) of every head.

    **Shapes**: x [B, T, heads, D]; cos, sin [T, r] or [B, T, r], r = rotary_dim / 2 or rotary_dim; returns x's shape.

    **Source**: Su et al., "RoFormer" (2021), equation 34 (``"interleaved"``); the half-split order of GPT-NeoX and
    Llama (``"half"``): y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
    """
    if kind == "none":
        return x
    width = rotary_dim or x.shape[-1]
    cos, sin = (half_width(table, kind, width).to(x.dtype).unsqueeze(-2) for table in (cos, sin))
    turned, rest = x[..., :width], x[..., width:]
    if kind == "half":
        x1, x2 = turned.chunk(2, -1)
        y = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    elif kind == "interleaved":
        x1, x2 = turned[..., ::2], turned[..., 1::2]
        y = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        raise ValueError(f"kind: expected none, half or interleaved, got {kind!r}")
    return torch.cat((y, rest), -1)
