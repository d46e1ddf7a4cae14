"""FFN activations as plain functions, and which of the fused kinds a given callable is.

A gated function takes gate and up side by side, [..., 2F] with the gate first, and returns [..., F]: so
`linear2(activation(linear1(x)))` reads the same for both sorts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import GELU, ReLU, SiLU

from ckptfused.spec import GATED_ACTIVATIONS

Activation = Callable[[Tensor], Tensor]
GATED = GATED_ACTIVATIONS


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation. **Source** `F.gelu(x, approximate="tanh")`."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU. **Source** So et al. 2021, Primer (arXiv 2109.08668)."""
    return F.relu(x).square()


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by its tanh approximation (Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def reglu(gate_up: Tensor) -> Tensor:
    """relu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.relu(gate) * up


PLAIN: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu2": relu2,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "reglu": reglu,
}


def plain_activation(activation: str | Activation) -> Activation:
    """The function of a name; a callable as it is. **Raises** `ValueError` for an unknown name."""
    if not isinstance(activation, str):
        if not callable(activation):
            raise TypeError(f"activation: expected a name or a callable, got {activation!r}")
        return activation
    if activation not in PLAIN:
        raise ValueError(f"activation: expected one of {', '.join(PLAIN)} or a callable, got {activation!r}")
    return PLAIN[activation]


def activation_kind(activation: Activation) -> str | None:
    """The fused kind of a callable, None if it is not one of them."""
    if isinstance(activation, nn.Module):
        if type(activation) is GELU:
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        return "relu" if type(activation) is ReLU else "silu" if type(activation) is SiLU else None
    if activation is torch.relu:
        return "relu"
    for kind, function in PLAIN.items():
        if activation is function:
            return kind
    return None
