"""Which of the fused activations a given name or callable is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import GELU, ReLU, SiLU

from ckptfused.eager.activation import FUNCTIONS, xielu
from ckptfused.layer.parts import NO_VECTORS
from ckptfused.spec import COEFFICIENTS_SLOT

Activation = Callable[[Tensor], Tensor]


class XIELU(nn.Module):
    """xIELU, an activation with two trained coefficients: a quadratic above 0, an exponential below (Apertus).

    (p·x + beta)·x above 0, (expm1(min(x, eps)) - x)·n + beta·x elsewhere, where p = softplus(alpha_p) and
    n = beta + softplus(alpha_n). alpha_p_init, alpha_n_init: p and n at first.

    **Shapes** input and result alike; `alpha_p` and `alpha_n` [1].
    **Source** Huang & Schlag 2024 (arXiv 2411.13010); `transformers.activations.XIELUActivation`.
    """

    alpha_p: Tensor
    alpha_n: Tensor

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not alpha_p_init > 0 or not alpha_n_init > beta:
            raise ValueError(
                f"expected alpha_p_init > 0 and alpha_n_init > beta, got {alpha_p_init}, {alpha_n_init} and {beta}"
            )
        for name, value in (("alpha_p", alpha_p_init), ("alpha_n", alpha_n_init - beta)):
            made = torch.full((1,), math.log(math.expm1(value)), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(made))
        self.beta, self.eps = beta, eps

    def coefficients(self) -> Tensor:
        """p, n, beta and eps as `ckptfused.spec` has them: [4], with gradients of `alpha_p` and `alpha_n`."""
        above, below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        return torch.cat((above, below, *(above.new_full((1,), value) for value in (self.beta, self.eps))))

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each entry."""
        return xielu(x, self.coefficients())

    def extra_repr(self) -> str:
        return f"beta={self.beta}, eps={self.eps}"


def coefficients_of(activation: Activation) -> dict[str, Tensor]:
    """The coefficients of an activation that has some, by their slot, as a call gives them."""
    return {COEFFICIENTS_SLOT: activation.coefficients()} if type(activation) is XIELU else NO_VECTORS


def plain_activation(activation: str | Activation, device: Any = None, dtype: Any = None) -> Activation:
    """The function of a name, or a module where it is trained; a callable as it is. **Raises** `ValueError` for an
    unknown name.
    """
    if not isinstance(activation, str):
        if not callable(activation):
            raise TypeError(f"activation: expected a name or a callable, got {activation!r}")
        return activation
    if activation not in FUNCTIONS:
        raise ValueError(f"activation: expected one of {', '.join(FUNCTIONS)} or a callable, got {activation!r}")
    return XIELU(device=device, dtype=dtype) if activation == "xielu" else FUNCTIONS[activation]


def activation_kind(activation: Activation) -> str | None:
    """The fused kind of a callable, None if it is not one of them."""
    if isinstance(activation, nn.Module):
        if type(activation) is GELU:
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        return {ReLU: "relu", SiLU: "silu", XIELU: "xielu"}.get(type(activation))
    if activation is torch.relu:
        return "relu"
    for kind, function in FUNCTIONS.items():
        if activation is function:
            return kind
    return None
