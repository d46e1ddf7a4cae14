"""Sizes of the models that `step.py` trains, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    tokens: int
    vocabulary: int = 0
    dropout: float = 0.1


def rows(shape: Shape, dtype: torch.dtype) -> Batch:
    """Random inputs of a stack [B, T, C], and the gradient that comes back."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.tokens, shape.width)
    x, dy = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return {"x": x.requires_grad_(), "dy": dy}


def text(shape: Shape, dtype: torch.dtype) -> Batch:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pictures(shape: Shape, dtype: torch.dtype) -> Batch:
    """Random pictures with random labels."""
    generator = torch.Generator().manual_seed(1)
    side = side_of(shape)
    values = torch.randn(shape.batch, 3, side, side, generator=generator).to(dtype)
    return {"pixel_values": values, "labels": torch.randint(0, shape.vocabulary, (shape.batch,), generator=generator)}


def side_of(shape: Shape) -> int:
    """Pixels of a square picture of so many patches."""
    return 16 * round(shape.tokens**0.5)
