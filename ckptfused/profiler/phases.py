"""What a profile is made of: phases, kinds, layers and moments of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Phase(NamedTuple):
    """A stretch of a step, by the layer that runs where one does."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


FORWARD, BACKWARD, OPTIMIZER, END = Phase("forward"), Phase("backward"), Phase("optimizer"), Phase("end")
HEAD_FORWARD, HEAD_BACKWARD = Phase("forward of the loss head"), Phase("backward of the loss head")
EMBEDDINGS_BACKWARD = Phase("backward of the embeddings")
REPLAY = "replay in backward"
"""The name of the phase in which a checkpoint runs a layer's forward again."""
AFTER_FORWARD, AFTER_BACKWARD = "after the forward", "after the backward"
"""The names of the phases between a layer and the next one that runs."""

PartBytes = tuple[int, int, int, int]
KINDS = ("weights", "optimizer", "gradients", "activations", "loss head", "transients")
"""Kinds of bytes; the last four are a `Peak`'s parts."""


class Peak(NamedTuple):
    """The most that a phase holds: gradients, activations, loss head and transients, and what was allocated last."""

    phase: Phase
    parts: PartBytes
    what: str


class Alive(NamedTuple):
    """Bytes that are there at the peak, of all buffers that one op allocated in one place."""

    kind: str
    """One of `KINDS`."""
    place: str
    """A layer's name, `"embeddings"`, `"loss head"`, `"between layers"` or `"optimizer"`."""
    op: str
    bytes: int


class Moment(NamedTuple):
    """A point of a step's timeline."""

    seconds: float
    bytes: tuple[int, ...]
    """By `KINDS`."""


@dataclass(frozen=True)
class LayerProfile:
    """What one layer adds to a step, in bytes and seconds; replays by a checkpoint count as its backward."""

    name: str
    saved: int = 0
    """Held from its forward to its backward and released there: its input where it keeps that. Tensors that several
    layers are given (masks, rotary tables) are no layer's own: they count between layers."""
    forward_transient: int = 0
    """The most while its forward runs, beyond what it and those before it keep for backward."""
    backward_transient: int = 0
    """The most while its backward runs, beyond what was kept for backward when that began, and gradients of parameters
    aside."""
    gradients: int = 0
    """Gradient bytes of its parameters; shared ones count at the first layer; outside of layers, of what is made there.
    """
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds
