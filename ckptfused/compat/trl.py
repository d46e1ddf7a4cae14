"""What TRL puts on a model that it trains: 1.16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FUSED_HEAD = "fused_lm_head"
"""The argument with which a model makes its loss in tiles instead of logits. Its signature hides it."""


def as_trained(model: Any, batch: Any) -> Any:
    """A batch as TRL's trainers call the model with it: of one that they gave a fused head, with that head.

    One that names the argument itself is as it was: with a loss function of the user's, SFTTrainer makes logits.
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    if isinstance(batch, Mapping) and any(FUSED_HEAD in names for names in _arguments(vars(inner).get("forward"))):
        return {FUSED_HEAD: True, **batch}
    return batch


def _arguments(function: Any) -> Iterator[tuple[str, ...]]:
    """The names in the code of a function, and of each that it is around."""
    while function is not None:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        yield getattr(code, "co_varnames", ())
        function = getattr(function, "__wrapped__", None)
