"""What a loss head computes, as data: `LossSpec`, a row of the table for each field as in `fields.py`."""

# No `from __future__ import annotations`: `table.rows` reads the annotations themselves.
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated

from .adapters import Adapter, checked_adapters
from .fields import COMPUTE_TYPES
from .quantized import Quantized, checked_quantized
from .table import Key, check_rows
from .text import refuse_unknown, row_values, row_words, split_words

HEAD = "head"
"""The target of an adapter beside a loss head's weight, and of that weight where it is stored in few bits."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Cross-entropy of logits l = softcap(logit_scale * (x @ weight.T + bias + adapters)).

    reduction "mean": the sum by the number of targets that are not ignored. Only the loss and the gradient that reaches
    the call are divided: the ops of its forward and its backward pass take "mean" as "sum".

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    keep: Annotated[str, Key("What forward makes for backward, or what it keeps.", ("gradients", "inputs"))] = (
        "gradients"
    )
    reduction: Annotated[str, Key("Sum or mean over tokens, or each token's loss.", ("sum", "mean", "none"))] = "sum"
    ignore_index: Annotated[int, Key("A token with this target has no loss.", least=-(2**63))] = -100
    label_smoothing: Annotated[float, Key("Share of the loss spread over all classes.", probability=True)] = 0.0
    logit_scale: Annotated[float, Key("Factor of the logits.")] = 1.0
    softcap: Annotated[float, Key("Logits become softcap * tanh(logits / softcap); 0: as they are.", least=0)] = 0.0
    z_loss: Annotated[float, Key("Factor of lse^2 in a token's loss.", least=0)] = 0.0
    scratch: Annotated[int, Key("Bytes of logits that exist at a time; 0: by device and shape.", least=0)] = 0
    compute: Annotated[str | None, Key("Type of the matrix products; None: the type of x.", COMPUTE_TYPES)] = None
    lora: Annotated[tuple[Adapter, ...], Key("Adapters beside the weight, in the order of adding.")] = ()
    quant: Annotated[tuple[Quantized, ...], Key("The weight, where it is stored in few bits.")] = ()
    classes: Annotated[int, Key("Classes of a weight that is stored in few bits.", least=0)] = 0
    _text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows(self)
        object.__setattr__(self, "lora", checked_adapters("lora", self.lora, (HEAD,)))
        object.__setattr__(self, "quant", checked_quantized("quant", self.quant, (HEAD,), transposed=False))
        if bool(self.quant) != bool(self.classes):
            expected = "1 or more of a stored weight" if self.quant else "0 of a weight of numbers"
            raise ValueError(f"classes: expected {expected}, got {self.classes}")
        object.__setattr__(self, "_text", " ".join(row_words(self)))

    def to_string(self) -> str:
        """The text form that the ops take: `key=value` words, defaults left out, order fixed."""
        return self._text

    @property
    def has_dropout(self) -> bool:
        """Whether a call draws random numbers."""
        return any(adapter.p > 0 for adapter in self.lora)


@lru_cache(maxsize=1024)
def parse_loss(text: str) -> LossSpec:
    """The spec of a text form, the inverse of `LossSpec.to_string`. **Raises** `ValueError`."""
    words = split_words(text)
    values = row_values(LossSpec, words)
    refuse_unknown(words, text)
    return LossSpec(**values)
