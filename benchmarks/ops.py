"""What an op to measure is, and the sizes that it is measured at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    tokens: int = 8192
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    chunk: int = 2048
    """Rows of logits that a chunked loss holds at a time."""
    vocabulary: int = 128_256

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


TINY = Sizes(2, 16, 64, 96, 4, 2, 16, 8, 200)
SMALL = Sizes(2, 197, 1024, 2816, 8, 2, 128, 150, 5003)
"""Several tiles of everything, and something left over."""


@dataclass(frozen=True)
class Op:
    """Our call, the eager one, pairs of what we found and what is right, and the bytes moved at least."""

    ours: Callable[[], object]
    eager: Callable[[], object]
    results: Callable[[], list[tuple[Tensor, Tensor]]]
    moved: int
    goal: float | None = 0.85
    flops: int = 0
    """Where arithmetic binds it."""


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def unset(like: Tensor) -> Tensor:
    """Outputs start as NaN: what nobody writes shows."""
    return torch.full_like(like, torch.nan)


def rms_norm(x: Tensor, w: Tensor, b: None = None) -> Tensor:
    """PyTorch's, of rows."""
    return F.rms_norm(x, (x.size(-1),), w, EPS)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """PyTorch's, of rows."""
    return F.layer_norm(x, (x.size(-1),), w, b, EPS)
