"""The FFN's activations as functions, by the names in `ckptfused.spec.ACTIVATIONS`.

A gated function takes gate and up side by side, [..., 2F] with the gate first, and returns [..., F]: so
`linear2(activation(linear1(x)))` reads the same for both sorts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import GATE


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation. **Source** `F.gelu(x, approximate="tanh")`."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU. **Source** So et al. 2021, Primer (arXiv 2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), GELU as CLIP has it. **Source** Hendrycks & Gimpel 2016 (arXiv 1606.08415), section 2."""
    return x * torch.sigmoid(1.702 * x)


def xielu(x: Tensor, coefficients: Tensor) -> Tensor:
    """(a·x + b)·x above 0, (expm1(min(x, eps)) - x)·n + b·x elsewhere, of the coefficients (a, n, b, eps).

    **Source** Huang & Schlag 2024 (arXiv 2411.13010), where a and n are softplus of what is trained, n with b added.
    """
    above, below, beta, eps = coefficients.to(x.dtype)
    return torch.where(x > 0, (above * x + beta) * x, (torch.expm1(torch.minimum(x, eps)) - x) * below + beta * x)


def glu(gate_up: Tensor) -> Tensor:
    """sigmoid(gate) * up; `F.glu` has the gate second. **Source** Dauphin et al. 2016 (arXiv 1612.08083), section 2."""
    return _gated(gate_up, "glu")


def _gated(gate_up: Tensor, act: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate, up, act)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    return _gated(gate_up, "swiglu")


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    return _gated(gate_up, "geglu")


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by its tanh approximation (Gemma)."""
    return _gated(gate_up, "geglu_tanh")


def quick_geglu(gate_up: Tensor) -> Tensor:
    """quick_gelu(gate) * up."""
    return _gated(gate_up, "quick_geglu")


def reglu(gate_up: Tensor) -> Tensor:
    """relu(gate) * up. **Source** Shazeer 2020 (arXiv 2002.05202), equation 6."""
    return _gated(gate_up, "reglu")


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu2": relu2,
    "quick_gelu": quick_gelu,
    "sigmoid": torch.sigmoid,
    "xielu": xielu,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "reglu": reglu,
    "quick_geglu": quick_geglu,
    "glu": glu,
}


def activation(gate: Tensor | None, up: Tensor, act: str, coefficients: Tensor | None = None) -> Tensor:
    """h = act(up), or act(gate) * up for the gated kinds.

    **Shapes**: gate, up, result [..., F]; coefficients, of an activation that has some, [4].
    """
    applied = GATE[act]
    if applied is None:
        return FUNCTIONS[act](up) if coefficients is None else FUNCTIONS[act](up, coefficients)
    if gate is None:
        raise ValueError(f"gate: expected a tensor for the gated activation {act}, got None")
    return FUNCTIONS[applied](gate) * up
