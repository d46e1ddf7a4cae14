"""What of timm is not documented: 1.0."""

from __future__ import annotations

from torch import nn


def is_fast(norm: nn.Module) -> bool:
    """Whether a norm computes in reduced precision where it may. `_fast_norm`."""
    return getattr(norm, "_fast_norm", False)
