"""Norm layers by name, and which of the fused kinds a given layer is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm

from ckptfused.spec import NORMS
from ckptfused.spec.checks import check_at_least


class GemmaNorm(nn.Module):
    """RMSNorm whose weight is stored as the difference from one.

    **Shapes** x: [..., C]. Result: as x.
    **Source** Gemma Team 2024 (arXiv 2403.08295), as Hugging Face's `GemmaRMSNorm`.
    """

    def __init__(self, width: int, eps: float = 1e-6, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * (1 + weight)."""
        return nn.functional.rms_norm(x, (x.size(-1),), 1 + self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)}, eps={self.eps}"


def make_norm(kind: str, width: int, eps: float, bias: bool, device: Any, dtype: Any, where: str = "norm") -> Any:
    """A norm layer over the last dimension. **Raises** `ValueError` for an unknown kind, named `where`."""
    if not (eps is None and kind == "rmsnorm"):
        eps = check_at_least("layer_norm_eps", eps, 0.0)
    if kind == "layernorm":
        return nn.LayerNorm(width, eps=eps, bias=bias, device=device, dtype=dtype)
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=eps, device=device, dtype=dtype)
    if kind == "gemma":
        return GemmaNorm(width, eps=eps, device=device, dtype=dtype)
    raise ValueError(f"{where}: expected one of {', '.join(NORMS[1:])}, got {kind!r}")


def norm_kind(norm: nn.Module | None, width: int) -> str | None:
    """The fused kind of a layer over the last `width` entries ("none" for no layer), None for any other."""
    if norm is None:
        return "none"
    if type(norm) is GemmaNorm:
        return "gemma" if norm.weight.size(0) == width else None
    for kind, layer in (("layernorm", LayerNorm), ("rmsnorm", RMSNorm)):
        if type(norm) is layer and norm.normalized_shape == (width,):
            return kind
    return None


def norm_eps(norm: Any, x: Tensor) -> float:
    """The layer's eps; where `nn.RMSNorm` has None, that is the resolution of x's dtype."""
    return torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
