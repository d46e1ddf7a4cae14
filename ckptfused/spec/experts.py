"""What the experts of a mixture compute beside their products, as data: `ExpertsSpec`."""

# No `from __future__ import annotations`: `table.rows` reads the annotations themselves.
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, cast

from .activations import ACTIVATIONS, COEFFICIENTS, GATE
from .checks import check_choice
from .fields import COMPUTE_TYPES
from .quantized import BY_BITSANDBYTES, Quantized, checked_quantized
from .table import Key, check_rows
from .text import refuse_unknown, row_values, row_words, split_words

CLAMPED = "clamped"
"""A gated unit of experts alone: (clamp(u, -limit, limit) + offset) · g · sigmoid(alpha · g), g = min(gate, limit)."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Each expert is down(weight · act(up(x))), where up makes gate and up side by side if the activation is gated.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    act: Annotated[str, Key("The activation.", (*(a for a in ACTIVATIONS if a not in COEFFICIENTS), CLAMPED))]
    interleaved: Annotated[bool, Key("Gate and up alternate, not one behind the other.")] = False
    transposed: Annotated[bool, Key("Weights are [E, in, out], not [E, out, in].")] = False
    limit: Annotated[float, Key("Of clamped: where gate and up end.", least=0)] = 0.0
    alpha: Annotated[float, Key("Of clamped: factor in the sigmoid.")] = 1.0
    offset: Annotated[float, Key("Of clamped: what is added to up.")] = 0.0
    up_scale: Annotated[float, Key("Factor of the adapter on the first product.")] = 1.0
    down_scale: Annotated[float, Key("Factor of the adapter on the last product.")] = 1.0
    up_p: Annotated[float, Key("Dropout on what the adapter on the first product is given.", probability=True)] = 0.0
    down_p: Annotated[float, Key("Dropout on what the adapter on the last product is given.", probability=True)] = 0.0
    quant: Annotated[tuple[Quantized, ...], Key("Stacks in 4 bits, up or down.")] = ()
    compute: Annotated[str | None, Key("Type of the matrix products; None: the type of x.", COMPUTE_TYPES)] = None
    _text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows(self)
        object.__setattr__(self, "quant", checked_quantized("quant", self.quant, ("up", "down"), transposed=False))
        for stack in self.quant:
            check_choice("quant.kind", stack.kind, BY_BITSANDBYTES)
        object.__setattr__(self, "_text", " ".join(row_words(self)))

    def to_string(self) -> str:
        """The text form that the ops take: `key=value` words, defaults left out, order fixed."""
        return self._text

    def form(self, target: str) -> str | None:
        """How the stack of a product is stored; None: as numbers. target: "up" or "down"."""
        return next((stack.form for stack in self.quant if stack.target == target), None)

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.act == CLAMPED or GATE[self.act] is not None

    def with_adapters(self, numbers: Iterable[tuple[str, float]]) -> "ExpertsSpec":
        """The same experts with adapters of these scales and rates of dropout, by the names of the fields."""
        return replace(self, **cast(Any, dict(numbers)))

    @property
    def has_dropout(self) -> bool:
        """Whether a call draws random numbers."""
        return self.up_p > 0 or self.down_p > 0


@lru_cache(maxsize=1024)
def parse_experts(text: str) -> ExpertsSpec:
    """The spec of a text form, the inverse of `ExpertsSpec.to_string`. **Raises** `ValueError`."""
    words = split_words(text)
    values = row_values(ExpertsSpec, words)
    refuse_unknown(words, text)
    return ExpertsSpec(**values)
