"""Norm layers by name, and which of the fused kinds a forward computes."""

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


def make_norm(
    kind: str, width: int, eps: float, bias: bool, device: Any, dtype: Any, where: str = "norm", affine: bool = True
) -> Any:
    """A norm layer over the last dimension. affine: it has a weight. **Raises** `ValueError` for an unknown kind, named
    `where`, and for one that is nothing without a weight.
    """
    if not (eps is None and kind == "rmsnorm"):
        eps = check_at_least("layer_norm_eps", eps, 0.0)
    if kind == "layernorm":
        return nn.LayerNorm(width, eps, affine, bias, device, dtype)
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps, affine, device, dtype)
    if kind == "gemma" and affine:
        return GemmaNorm(width, eps=eps, device=device, dtype=dtype)
    kinds = NORMS[1:] if affine else ("layernorm", "rmsnorm")
    raise ValueError(f"{where}: expected one of {', '.join(kinds)}, got {kind!r}")


# By the forward as it is now: a subclass that keeps it computes the same, a class that is patched later does not.
_KINDS: dict[Any, str] = {LayerNorm.forward: "layernorm", RMSNorm.forward: "rmsnorm", GemmaNorm.forward: "gemma"}


def own_kind(forward: Any) -> str | None:
    """The fused kind of the norm that PyTorch's forward, or ours, computes; None for any other forward."""
    return _KINDS.get(forward)
