"""Dropout with a given keep mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .philox import DECISIONS, keep_threshold


def scale_of_kept(p: float) -> float:
    """What kept values are multiplied by: 65536 / (65536 - t), so that the mean is exact; 0 when all are dropped."""
    t = keep_threshold(p)
    return DECISIONS / (DECISIONS - t) if t < DECISIONS else 0.0


def random_mask(shape: Sequence[int], p: float, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A keep mask that PyTorch's own generator draws: under `torch.vmap` by its `randomness`."""
    return torch.rand(shape, device=device, generator=generator) >= keep_threshold(p) / DECISIONS


def dropout(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """x where kept, scaled, and 0 elsewhere (also where x is not finite). keep None: x itself.

    **Shapes**: x any; keep bool of x's shape.
    """
    if keep is None:
        return x
    return torch.where(keep, x * scale_of_kept(p), torch.zeros((), dtype=x.dtype, device=x.device))
