"""The ways in which a mask is arranged, and those that say no more than places do."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptfused.layer.mask_patterns import pattern
from ckptfused.models.derive.rules.products import by_heads

HIDES = -1e4
"""What a layer itself puts in the place of a logit, or adds to it, hides its key from here downwards: a softmax makes 0
of it in any type, beside logits above -9,000."""


def heads_of_mask(mask: Tensor, batch: int, heads: int) -> Tensor:
    """A mask of logits as [B or 1, H or 1, T or 1, T]."""
    if mask.dim() == 3 and mask.shape[0] == batch * heads:
        return by_heads(mask, batch)  # type: ignore[return-value]
    return mask[(None,) * (4 - mask.dim())]


def arranged(mask: Tensor, batch: int, t: int) -> dict[str, Tensor]:
    """A mask as [B, H, T, T], in every way in which one may be meant."""
    found: dict[str, Tensor] = {}
    if mask.dim() == 4:
        found["full"] = mask
    elif mask.dim() == 3:
        found["batch"] = mask[:, None]
        if mask.shape[0] % batch == 0:
            found["heads"] = mask.unflatten(0, (batch, -1))
        found["by head"] = mask[None]
    elif mask.dim() == 2:
        if tuple(mask.shape) == (t, t):
            found["square"] = mask[None, None]
        if tuple(mask.shape) == (batch, t):
            found["padding"] = mask[:, None, None, :]
    return found


def seen_by_place(mask: Tensor, kind: str, t_q: int, t_k: int) -> tuple[bool, int] | None:
    """Whether a mask hides the keys after each query, and how far a query sees, back or to both sides (0: all the way);
    None where it hides others.
    """
    if mask.is_floating_point() if kind == "add" else bool(((mask == 0) | (mask == 1)).all()):
        mask = mask.masked_fill(mask <= HIDES, -torch.inf) if kind == "add" else mask.bool()
    else:
        return None
    try:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (t_q, t_k)))
    except RuntimeError:
        return None
    if t_q != t_k or mask.shape[-2:] != (t_q, t_k) or not mask.numel():
        return None
    found = pattern(mask.reshape(-1, t_q, t_k), kind)
    return None if found is None or found.padding is not None else (found.causal, found.window)


def in_rows(mask: Tensor, form: str, batch: int) -> Tensor:
    """A mask that was given in one of the ways of `arranged`, as [B, H, T, T]."""
    if form == "batch":
        return mask[:, None]
    if form == "by head":
        return mask[None]
    if form == "heads":
        return mask.unflatten(0, (batch, -1))
    if form == "square":
        return mask[None, None]
    return mask[:, None, None, :] if form == "padding" else mask
