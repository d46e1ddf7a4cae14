"""What a training step needs, by layer and by moment: the one result of all ways of finding it out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ckptfused.profiler import plot as picture
from ckptfused.profiler import table
from ckptfused.profiler.phases import Alive, LayerProfile, Moment, Peak
from ckptfused.simulate.cards import fitting


@dataclass(frozen=True)
class Profile:
    """A training step: bytes at its peak, whose parts add up to it, and what each layer adds."""

    peak: int
    """Peak bytes that the allocator is asked for, weights and optimizer state included."""
    weights: int
    """Parameters and buffers, other tensors that modules hold and no step replaces, the batch (of slices of larger
    tensors what they span), and what `DistributedDataParallel` reduces gradients in."""
    optimizer: int
    """What the optimizer keeps between steps, in its state or other attributes."""
    gradients: int
    """Gradient bytes of parameters that are there at the peak."""
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
    autocast: str = ""
    """`"bfloat16"` or `"float16"`: forward ran in a region of `torch.autocast`; "": only what the model turns on."""
    gradient_accumulation_steps: int = 1
    """More than 1: over so many batches gradients add up before the optimizer's step. Bytes, and times of parts, are
    those of the last of them, which begins with all gradients."""
    release: bool = False
    """Each weight was updated in backward: its gradient is among the transients until then."""
    way: str = "predicted"
    """`"predicted"` on meta tensors, or `"measured"` by the device's allocator."""
    layers: tuple[LayerProfile, ...] = ()
    """In the order of `convert.find.layers`."""
    embeddings: LayerProfile = field(default_factory=partial(LayerProfile, "embeddings"))
    """What runs before the first layer."""
    head: LayerProfile = field(default_factory=partial(LayerProfile, "loss head"))
    """What runs after the last layer."""
    between: LayerProfile = field(default_factory=partial(LayerProfile, "between layers"))
    """What runs between layers, and what several of them share; of a model without layers, all."""
    all_gradients: int = 0
    """The gradients of all parameters, at the end of backward."""
    left: int = 0
    """What a step has as it begins and replaces, or has no need of: what modules keep of the one before, gradients of a
    batch. It is among the activations, or transients, as long as it is there."""
    varied: bool = False
    """Steps that were predicted one after the other need different amounts: it is the one that needs the most."""
    optimizer_transient: int = 0
    """The most that the optimizer's step holds beside its state."""
    optimizer_seconds: float = 0.0
    fragmentation: int = 0
    """The most that the allocator had reserved, less the most that it had handed out; 0 where that is not known."""
    workspace: int = 0
    """The most that a product of oneDNN's may allocate within itself in a predicted step on the CPU, of ckptfused's or
    in half precision. It is not in `peak`; a plan leaves it free."""
    host: int = 0
    """The most bytes that layers' inputs take in pinned host memory, with offload, in a predicted step: each what it
    has, but for its last 16 MiB or less, which take the next power of two. They are not in `peak`."""
    alive: tuple[Alive, ...] = field(default=(), repr=False)
    """What there is at the peak, largest first."""
    timeline: tuple[Moment, ...] = field(default=(), repr=False)
    marks: tuple[tuple[float, str], ...] = field(default=(), repr=False)
    """When forward, backward and the optimizer's step begin, and when the step ends, in seconds."""
    time_error: float | None = None
    """The largest relative error of a predicted time of a whole step that was measured on this kind of device; None: it
    was never measured there, or the time is a measured one."""
    notes: tuple[str, ...] = ()
    """What the numbers leave out or take for granted."""
    uncounted: str = ""
    """The first note that says of a layer, an optimizer or gradients that they are not counted, or not all: no plan
    keeps a budget then. "": all are."""

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
        """Seconds of the whole step: of all batches, and the optimizer."""
        batch = self.forward_seconds + self.backward_seconds
        return self.gradient_accumulation_steps * batch + self.optimizer_seconds

    @property
    def accumulated(self) -> int:
        """Bytes of gradients that are there as forward begins."""
        return self.all_gradients if self.gradient_accumulation_steps > 1 else 0

    @classmethod
    def of_phases(cls, weights: int, optimizer: int, phases: Iterable[Peak], **more: Any) -> Profile:
        """The profile at the phase that needs most, the first where several do."""
        phases = tuple(phases)
        top = max(phases, key=lambda peak: sum(peak.parts))
        peak = weights + optimizer + sum(top.parts)
        return cls(peak, weights, optimizer, *top.parts, moment=f"{top.phase}: {top.what}", phases=phases, **more)

    def sizes(self) -> dict[str, Any]:
        """The peak, its parts and its moment."""
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("phases")]}

    def plot(self, path: str | Path) -> None:
        """Writes a PNG of the step's timeline: bytes by kind, stacked. **Raises** as `policy.plot.plot`."""
        picture.plot(self, path)

    def __rich__(self) -> Any:
        return table.rich_table(self)

    def __str__(self) -> str:
        return table.text(self)

    def to_json(self) -> str:
        """Everything but the timeline, in bytes and seconds, and the cards on which the step fits."""
        left_out = ("timeline", "phases", "alive")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        found["alive"] = [row._asdict() for row in self.alive]
        found["seconds"] = self.seconds
        found["fits"] = fitting(self.peak)
        return json.dumps(found, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote."""
        found = json.loads(text)
        del found["seconds"], found["fits"]
        for name in ("embeddings", "head", "between"):
            found[name] = LayerProfile(**found[name])
        found["layers"] = tuple(LayerProfile(**row) for row in found["layers"])
        found["alive"] = tuple(Alive(**row) for row in found["alive"])
        found["marks"] = tuple((when, name) for when, name in found["marks"])
        return cls(**found | {"notes": tuple(found["notes"])})
