"""Attention itself, as it was read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ckptfused.models.derive.recording.recorder import Recorded, Value


class Outer(NamedTuple):
    """A tensor from outside: an argument of the forward (`"arg:2"`) or what the layer holds (`"buffer:cos"`)."""

    name: str
    form: str = ""
    """How it is arranged: of masks as in `arranged`, of tables as in `rotations`."""


class Core(NamedTuple):
    """Attention itself, whichever way it was written."""

    q: Value
    k: Value
    v: Value
    y: Value
    ends: tuple[Tensor, Tensor, Tensor, Tensor]
    """The numbers of q, k, v and the result, [B, heads, T, D]."""
    scale: float
    softcap: float = 0.0
    causal: bool = False
    mask: Outer | None = None
    kind: str = "none"
    constant: Value | None = None
    """The mask by place alone that the layer makes itself, where it does; it has to be that one at every length."""
    constant_kind: str = ""
    dropout: Recorded | None = None
    padding: Outer | None = None
    """A second mask, of keys."""
    padding_kind: str = "none"
    window: int = 0
    """How far a query sees by the layer's own mask, back or to both sides; 0: all the way."""
    also: tuple[tuple[Outer, str], ...] = ()
    """Masks beside those, with their kinds."""
    weights: tuple[Value, ...] = ()
    """The probabilities, before and after their dropout, where the layer has them."""
    sinks: str = ""
    """The name of a logit for each head beside those of the keys."""
