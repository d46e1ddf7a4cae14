"""What each layer costs in one step, as its profile shows."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from ckptfused.planner import frontier
from ckptfused.profiler.phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BACKWARD,
    EMBEDDINGS_BACKWARD,
    FORWARD,
    HEAD_BACKWARD,
    HEAD_FORWARD,
    REPLAY,
    Phase,
)
from ckptfused.profiler.result import Profile


class Cost(NamedTuple):
    """The cost of one layer or of the loss head. Bytes are above what layers before it hold, and gradients of those
    after it.
    """

    saved: int
    forward: int
    """The most during its forward, `saved` included."""
    backward: int
    """The most during its backward, `saved` and the gradients of its own parameters included."""
    forward_seconds: float
    backward_seconds: float

    def shifted(self, here: Cost, there: Cost) -> Cost:
        """What it would be of a layer that costs `here` what this one costs `there`."""
        return Cost(*(max(0, x + a - b) for x, a, b in zip(self, here, there, strict=True)))  # type: ignore[arg-type]

    def spared(self, after: Cost, alone: Cost) -> Cost:
        """What it would be, in bytes, where one that costs `alone` otherwise costs `after`."""
        saved, forward, backward = (max(0, x + a - b) for x, a, b in zip(self[:3], after[:3], alone[:3], strict=True))
        return self._replace(saved=saved, forward=forward, backward=backward)

    def without(self, held: int) -> Cost:
        """What it would be if so many of its bytes were somebody else's."""
        return self.spared(Cost(0, 0, 0, 0, 0), Cost(held, held, held, 0, 0))

    def holds_less(self, other: Cost) -> bool:
        return any(own < others for own, others in zip(self[:3], other[:3], strict=True))

    def mode(
        self, lingers: int = 0, waits: float = 0.0, ending: Cost | None = None, keeps_output: bool = False
    ) -> frontier.UnitMode:
        """For the programme. lingers: bytes of `saved` that are on the host; waits: seconds for them to come; ending:
        what the layer costs that saves its input alone, as it does at the end of a replay.
        """
        seconds = self.forward_seconds + self.backward_seconds + waits
        last = ending and frontier.UnitMode(ending.backward_seconds, ending.saved, ending.saved, ending.backward)
        return frontier.UnitMode(
            seconds, self.saved - lingers, self.forward, self.backward, lingers, last, keeps_output
        )


_OF = {REPLAY: BACKWARD.name, AFTER_FORWARD: FORWARD.name, AFTER_BACKWARD: BACKWARD.name}
"""Names of phases that count as another of the same layer."""


def measured_costs(profile: Profile) -> list[Cost]:
    """What each layer cost in a step, and the loss head after them."""
    most: defaultdict[Phase, int] = defaultdict(int)
    for (name, index), parts, _ in profile.phases:
        phase = Phase(_OF.get(name, name), index)
        most[phase] = max(most[phase], sum(parts))
    made = [0 if profile.accumulated else layer.gradients for layer in profile.layers]
    held, after, found = held_beside(profile) + profile.accumulated, sum(made), []
    for index, layer in enumerate(profile.layers):
        after -= made[index]
        forward = max(layer.saved, most[Phase(FORWARD.name, index)] - held)
        backward = max(layer.saved, most[Phase(BACKWARD.name, index)] - held - after)
        found.append(Cost(layer.saved, forward, backward, layer.forward_seconds, layer.backward_seconds))
        held += layer.saved
    head = profile.head
    forward, backward = (max(0, most[phase] - held) for phase in (HEAD_FORWARD, HEAD_BACKWARD))
    return [*found, Cost(0, forward, backward, head.forward_seconds, head.backward_seconds)]


def embeddings_of(profile: Profile) -> int:
    """The most in the backward of what runs before the layers, beside the layers' gradients."""
    own = max((sum(peak.parts) for peak in profile.phases if peak.phase == EMBEDDINGS_BACKWARD), default=0)
    return own - (profile.accumulated or sum(layer.gradients for layer in profile.layers))


def held_beside(profile: Profile) -> int:
    """From forward to backward, beside the layers' own."""
    return profile.embeddings.saved + profile.between.saved
