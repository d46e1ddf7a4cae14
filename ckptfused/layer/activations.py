"""Which of the fused activations a given name or callable is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import GELU, ReLU, SiLU

from ckptfused.eager.activation import FUNCTIONS

Activation = Callable[[Tensor], Tensor]


def plain_activation(activation: str | Activation) -> Activation:
    """The function of a name; a callable as it is. **Raises** `ValueError` for an unknown name."""
    if not isinstance(activation, str):
        if not callable(activation):
            raise TypeError(f"activation: expected a name or a callable, got {activation!r}")
        return activation
    if activation not in FUNCTIONS:
        raise ValueError(f"activation: expected one of {', '.join(FUNCTIONS)} or a callable, got {activation!r}")
    return FUNCTIONS[activation]


def activation_kind(activation: Activation) -> str | None:
    """The fused kind of a callable, None if it is not one of them."""
    if isinstance(activation, nn.Module):
        if type(activation) is GELU:
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        return "relu" if type(activation) is ReLU else "silu" if type(activation) is SiLU else None
    if activation is torch.relu:
        return "relu"
    for kind, function in FUNCTIONS.items():
        if activation is function:
            return kind
    return None
