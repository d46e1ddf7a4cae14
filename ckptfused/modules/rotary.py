"""Tables of cosines and sines for rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_FIRST_LENGTH = 512


def _stored(dtype: torch.dtype) -> torch.dtype:
    """The type of the tables in a module of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RotaryTable(nn.Module):
    """cos and sin of position times frequency, kept for the positions met so far.

    The tables are non-persistent buffers: they move with the module and stay out of `state_dict`. They are
    computed in float64 and stored in float32 (float64 in a float64 module), whatever `.half()` or `.to()`
    does to the parameters. They grow in powers of two in eager mode; inside `torch.compile`, a sequence
    longer than the table gets one computed in the graph.

    **Shapes** dim: the rotary width r (even). Result of a call: cos and sin, each [T, r/2].
    **Source** Su et al. 2021, RoFormer (arXiv 2104.09864), equation 15: frequencies theta^(-2i/r).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        theta: float = 1e4,
        length: int = _FIRST_LENGTH,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"rotary_dim: expected an even number of at least 2, got {dim}")
        if not theta > 0:
            raise ValueError(f"rope: expected a positive theta, got {theta!r}")
        self.dim = dim
        self.theta = float(theta)
        stored = _stored(torch.get_default_dtype() if dtype is None else dtype)
        cos, sin = self.table(length, stored, torch.get_default_device() if device is None else device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def table(self, length: int, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … length - 1, computed afresh."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        frequencies = torch.pow(self.theta, -steps / self.dim)
        angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … length - 1: views of the buffers wherever they reach."""
        # Read once: another thread may put shorter tables in place meanwhile.
        cos, sin = self.cos, self.sin
        if length > min(cos.size(0), sin.size(0)):
            if torch.compiler.is_compiling():
                return self.table(length, cos.dtype, cos.device)
            cos, sin = self._fill(max(_FIRST_LENGTH, 1 << (length - 1).bit_length()), cos.dtype, cos.device)
        return cos[:length], sin[:length]

    def packed(self, cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions that start anew in each of the packed sequences; new tensors."""
        cos, sin = self(length)
        place = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        start = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
        position = (place - start).clamp(0, length - 1)  # bounds out of range are refused by the op
        return cos[position], sin[position]

    def _fill(self, length: int, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
        # A table made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            self.cos, self.sin = tables = self.table(length, dtype, device)
        return tables

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        super()._apply(fn, recurse)
        self._fill(self.cos.size(0), _stored(self.cos.dtype), self.cos.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.dim}, theta={self.theta}"
