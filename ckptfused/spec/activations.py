"""The FFN's activations: the one list of their names."""

from __future__ import annotations

GATE: dict[str, str | None] = {
    "relu": None,
    "gelu": None,
    "gelu_tanh": None,
    "silu": None,
    "relu2": None,
    "quick_gelu": None,
    "sigmoid": None,
    "xielu": None,
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "quick_geglu": "quick_gelu",
    "glu": "sigmoid",
}
"""Every activation by its name, with the plain one that it applies to its gate: `act(gate) * up`. None: not gated."""

ACTIVATIONS = tuple(GATE)
GATED_ACTIVATIONS = tuple(name for name, gate in GATE.items() if gate is not None)
COEFFICIENTS = {"xielu": 4}
"""How many coefficients an activation has, which a call gives; others have none."""
PLAIN_ACTIVATIONS = tuple(name for name, gate in GATE.items() if gate is None and name not in COEFFICIENTS)
"""Functions of one value alone."""
GATED_BY = {gate: name for name, gate in GATE.items() if gate is not None}
"""The gated activation that applies a plain one."""
