"""Attention with every option, the T x T matrix written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import dropout


def position_mask(t_q: int, t_k: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """bool [t_q, t_k]: key j visible to query i by position alone: j <= i when causal, i - j < window and, when not
    causal, j - i < window (window 0: no limit)."""
    i = torch.arange(t_q, device=device)[:, None]
    j = torch.arange(t_k, device=device)[None, :]
    visible = torch.ones(t_q, t_k, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (j <= i)
    if window:
        visible = visible & (i - j < window)
        if not causal:
            visible = visible & (j - i < window)
    return visible


def shown_by(mask: Tensor, kind: str) -> Tensor:
    """Where a caller's mask shows a key, bool of its shape. Added values of -5e8 or less hide; NaN does not."""
    if kind == "add":
        return ~(mask <= max(-5e8, torch.finfo(mask.dtype).min))
    return mask if kind == "keep" else ~mask


def _split(mask: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """A caller's mask as (visible, what is added to visible logits)."""
    visible = shown_by(mask, kind)
    return visible, mask.masked_fill(~visible, 0) if kind == "add" else None


def probabilities(logits: Tensor, row: Tensor, sinks: Tensor | None = None) -> Tensor:
    """softmax(logits), the sinks' left out, and zeros where `row` is false: where a query sees no key."""
    logits = logits.masked_fill(~row, 0)
    if sinks is not None:
        logits = torch.cat((logits, sink_logits(sinks, logits)), -1)
    probs = torch.softmax(logits, -1)
    return (probs if sinks is None else probs[..., :-1]).masked_fill(~row, 0)


def sink_logits(sinks: Tensor, logits: Tensor) -> Tensor:
    """The logit of each head's sink for each query. **Shapes** sinks [H], logits [B, H, T, T]; returns [B, H, T, 1]."""
    return sinks[:, None, None].expand(*logits.shape[:-1], 1)


def weigh(logits: Tensor, row: Tensor, v: Tensor, keep: Tensor | None, p: float, sinks: Tensor | None = None) -> Tensor:
    """o = drop(softmax(logits)) v.

    **Shapes**: logits, keep [B, H, T, T]; row [B, H, T, 1], true where a query sees a key; v, o [B, H, T, D].
    """
    return torch.matmul(dropout(probabilities(logits, row, sinks), keep, p), v)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_kind: str = "none",
    padding: Tensor | None = None,
    padding_kind: str = "none",
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    p: float = 0.0,
    sinks: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """o = drop(softmax(cap * tanh(scale * q k^T / cap) + masks)) v and the rows' log-sum-exp.

    A row with every key masked gives o = 0, lse = -inf and no gradient. With sinks the softmax and the log-sum-exp are
    over one more logit a head, which no mask hides, and whose value is 0.

    **Shapes**: q [B, H, T, D]; k, v [B, G, T, D], head h reads h // (H / G); mask broadcastable to [B, H, T, T];
    padding [B, T]; keep bool [B, H, T, T] (site 0's dropout mask); sinks [H]; returns o [B, H, T, D], lse [B, H, T].

    **Source**: ``F.scaled_dot_product_attention``, which ``fused=True`` calls where it can (the eager baseline).
    """
    heads, t_q, t_k = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    visible = position_mask(t_q, t_k, causal, window, q.device)[None, None]
    bias: Tensor | None = None
    for given, kind in ((mask, mask_kind), (None if padding is None else padding[:, None, None, :], padding_kind)):
        if given is None:
            continue
        seen, added = _split(given, kind)
        visible = visible & seen
        if added is not None:
            added = added.to(q.dtype)
            bias = added if bias is None else bias + added
    row = visible.any(-1, keepdim=True)

    logits = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits.detach(), -1)
    if sinks is not None:
        sinks = sinks.to(q.dtype)
        lse = torch.logaddexp(lse, sinks.detach()[:, None])
    if fused and keep is None and sinks is None and not softcap and bool(row.all()):
        total = visible if bias is None else bias.masked_fill(~visible, -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, total.expand(q.shape[0], heads, t_q, t_k), scale=scale), lse
    return weigh(logits, row, v, keep, p, sinks), lse
