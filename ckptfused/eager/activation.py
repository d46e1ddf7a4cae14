"""The FFN's activations, plain and gated."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda u: F.relu(u).square(),
}
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def activation(gate: Tensor | None, up: Tensor, act: str) -> Tensor:
    """h = act(up), or act(gate) * up for the gated kinds.

    **Shapes**: gate, up, result [..., F].

    **Source**: ``torch.nn.functional``; relu2: So et al., "Primer" (2021); gated: Shazeer, "GLU variants improve
    transformer" (2020), equation 5.
    """
    if act in PLAIN:
        return PLAIN[act](up)
    if gate is None:
        raise ValueError(f"gate: expected a tensor for the gated activation {act}, got None")
    return PLAIN[GATED[act]](gate) * up
