"""What a training step needs, by layer and by moment: the one result of all ways of finding it out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """A stretch of a step, by the layer that runs where one does."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


FORWARD, BACKWARD, OPTIMIZER, END = Phase("forward"), Phase("backward"), Phase("optimizer"), Phase("end")
HEAD, HEAD_BACKWARD = Phase("forward of the loss head"), Phase("backward of the loss head")
EMBEDDINGS_BACKWARD = Phase("backward of the embeddings")
REPLAY = "replay in backward"
"""The name of the phase in which a checkpoint runs a layer's forward again."""

Parts = tuple[int, int, int, int]
KINDS = ("weights", "optimizer", "gradients", "activations", "loss head", "transients")
"""Of what a moment's bytes are made; the last four are a `Peak`'s parts."""


class Peak(NamedTuple):
    """The most that a phase holds: gradients, activations, loss head and transients, and what was allocated last."""

    phase: Phase
    parts: Parts
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
    """Of its parameters; of those that layers share at the first one; outside of layers, of what is made there."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Profile:
    """A training step: bytes at its peak, whose parts add up to it, and what each layer adds."""

    peak: int
    """Of what the allocator is asked for, weights and optimizer state included."""
    weights: int
    """Parameters and buffers, and the batch."""
    optimizer: int
    """What the optimizer keeps between steps."""
    gradients: int
    """Those of parameters that are there at the peak."""
    activations: int
    """What forward made up to the last layer and backward still needs, or forward itself just then."""
    loss_head: int
    """What was made after the last layer, logits and their gradients."""
    transients: int
    """The rest: what a layer's backward, or the optimizer, holds for itself."""
    moment: str
    """When: `"backward of layer 3: aten::mm"`."""
    phases: tuple[Peak, ...] = field(default=(), repr=False)
    """The most in each phase of the step."""
    device: str = ""
    """One of `devices.NAMES`; of a measured step on a GPU, the GPU's own name."""
    way: str = "predicted"
    """`"predicted"` on meta tensors, or `"measured"` by the device's allocator."""
    layers: tuple[LayerProfile, ...] = ()
    """In the order of `convert.find.layers`."""
    embeddings: LayerProfile = LayerProfile("embeddings")
    """What runs before the first layer."""
    head: LayerProfile = LayerProfile("loss head")
    """What runs after the last layer."""
    between: LayerProfile = LayerProfile("between layers")
    """What runs between layers, and what several of them share; of a model without layers, all."""
    all_gradients: int = 0
    """The gradients of all parameters, at the end of backward."""
    optimizer_transient: int = 0
    """The most that the optimizer's step holds beside its state."""
    optimizer_seconds: float = 0.0
    fragmentation: int = 0
    """The most that the allocator had reserved, less the most that it had handed out; 0 where that is not known."""
    alive: tuple[Alive, ...] = field(default=(), repr=False)
    """What there is at the peak, largest first."""
    timeline: tuple[Moment, ...] = field(default=(), repr=False)
    marks: tuple[tuple[float, str], ...] = field(default=(), repr=False)
    """When forward, backward and the optimizer's step begin, and when the step ends, in seconds."""
    time_error: float | None = None
    """Of a predicted time, the largest relative error of a whole step that was measured on this kind of device; None:
    it was never measured there, or the time is a measured one."""
    notes: tuple[str, ...] = ()
    """What the numbers leave out or take for granted."""

    @property
    def above_state(self) -> int:
        """The peak less what is there between steps: weights and optimizer state."""
        return self.peak - self.weights - self.optimizer

    @property
    def saved(self) -> int:
        """Bytes that forward keeps for backward, by all parts of the model."""
        return sum(part.saved for part in self.parts)

    @property
    def parts(self) -> tuple[LayerProfile, ...]:
        """The layers and what is not in one."""
        return (self.embeddings, *self.layers, self.between, self.head)

    @property
    def forward_seconds(self) -> float:
        return sum(part.forward_seconds for part in self.parts)

    @property
    def backward_seconds(self) -> float:
        return sum(part.backward_seconds for part in self.parts)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds

    @classmethod
    def of_phases(cls, weights: int, optimizer: int, phases: Iterable[Peak], **more: Any) -> Profile:
        """Of the phase that needs most, the first where several do."""
        phases = tuple(phases)
        top = max(phases, key=lambda peak: sum(peak.parts))
        peak = weights + optimizer + sum(top.parts)
        return cls(peak, weights, optimizer, *top.parts, moment=f"{top.phase}: {top.what}", phases=phases, **more)

    def sizes(self) -> dict[str, Any]:
        """The peak, its parts and its moment."""
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("phases")]}

    def to_json(self) -> str:
        """Everything but the timeline, in bytes and seconds."""
        left_out = ("timeline", "phases", "alive")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        found["alive"] = [row._asdict() for row in self.alive]
        found["seconds"] = self.seconds
        return json.dumps(found, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Of what `to_json` gave."""
        found = json.loads(text)
        del found["seconds"]
        for name in ("embeddings", "head", "between"):
            found[name] = LayerProfile(**found[name])
        found["layers"] = tuple(LayerProfile(**row) for row in found["layers"])
        found["alive"] = tuple(Alive(**row) for row in found["alive"])
        found["marks"] = tuple((when, name) for when, name in found["marks"])
        return cls(**found | {"notes": tuple(found["notes"])})
