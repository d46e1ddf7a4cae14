"""What is drawn while a layer is recorded: dropout's masks, which a block draws, and numbers that it is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.eager.attention import attention
from ckptfused.eager.dropout import dropout

DRAWS = ("bernoulli", "rand")
"""Calls that draw random numbers which no block draws; at each call the layer's own do, by its generator."""


def drawn(noted: Any, func: Any, args: Any, kwargs: Any, generator: torch.Generator | None) -> Tensor | None:
    """The result of a dropout, or of attention with one, by a mask that the recorded call keeps, or of one of `DRAWS`;
    None of any other call.
    """
    if noted.op in DRAWS:
        return _numbers(noted.op, func(*args, **{**kwargs, "generator": generator}))
    if func is F.dropout:
        p, training = noted.given(1, "p", 0.5), noted.given(2, "training", True)
        if not training or p == 0:
            return None
        x = args[0] if args else kwargs["input"]
        noted.mask = torch.rand(x.shape, generator=generator) >= p
        made = dropout(x, noted.mask, p)
        return x.copy_(made) if kwargs.get("inplace") else made
    if func is F.scaled_dot_product_attention and (p := noted.given(4, "dropout_p", 0.0)) > 0:
        q, k, v = (args[i] if len(args) > i else kwargs[n] for i, n in enumerate(("query", "key", "value")))
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        noted.mask = torch.rand(*q.shape[:-1], k.size(-2), generator=generator) >= p
        kind = "none" if mask is None else "keep" if mask.dtype == torch.bool else "add"
        mask = mask if mask is None else mask[(None,) * (4 - mask.dim())]
        causal, scale = noted.given(5, "is_causal", False), noted.kwargs.get("scale")
        return attention(
            q, k, v, mask=mask, mask_kind=kind, causal=causal, scale=scale, keep=noted.mask, p=p, window=0
        )[0]
    return None


def _numbers(op: str, made: Tensor) -> Tensor:
    """Drawn numbers, of which the first and the last keep one batch element and leave out another at any rate; one
    alone keeps all at usual rates. A proof would see nothing of a half that is left out of all.
    """
    numbers, drawn = made.view(-1), op == "rand"
    if numbers.numel() > 1:
        numbers[0], numbers[-1] = (0.01, 0.99) if drawn else (1.0, 0.0)
    elif numbers.numel():
        numbers[0] = 0.5 if drawn else 1.0
    return made
