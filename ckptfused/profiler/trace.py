"""A step as a sequence of allocations and releases with marks of where they are, and what each buffer is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptfused.cost import OpenLedger
from ckptfused.profiler.phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BACKWARD,
    EMBEDDINGS_BACKWARD,
    END,
    FORWARD,
    HEAD_BACKWARD,
    HEAD_FORWARD,
    Phase,
)

GRADIENTS, SAVED_ACTIVATIONS, LOSS_HEAD, TRANSIENTS = range(4)
"""Places in `Parts`."""
EMBEDDINGS, AFTER, BETWEEN = -1, -2, -3
"""Stand-ins for a layer's index: what is in none."""


class Change(NamedTuple):
    """An allocation, or the release of what was allocated."""

    number: int
    size: int
    """In bytes; negative: released."""
    op: str


class Stretch(NamedTuple):
    """The events of a phase that follow one another."""

    phase: Phase
    begin: int
    end: int
    seconds: float


@dataclass
class Trace:
    """What happened in one step, in order.

    Of batches or steps one after the other, each with an `END`, it is the last, before whose changes are the
    allocations of what those before it left: gradients that add up, or what the model keeps for itself.
    """

    changes: list[Change]
    marks: list[tuple[int, Phase]]
    """Where in `changes` each phase begins, up to `END`."""
    received: set[tuple[int, int]]
    """Layers, and numbers of the buffers that they are given in forward."""
    seconds: list[float]
    """Seconds of each mark's stretch."""
    names: list[str]
    """The layers'."""
    layer_gradients: list[int]
    weights: int
    optimizer: int
    stretches: list[Stretch] = field(init=False)
    left: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    """What was there before the step, by number: its place in `Parts`, and that of the layer which made it."""

    def __post_init__(self) -> None:
        ends = [place for place, (_, phase) in enumerate(self.marks) if phase == END]
        if len(ends) > 1:
            self._leave(ends[-2])
        ends = [begin for begin, _ in self.marks[1:]] + [len(self.changes)]
        self.stretches = [
            Stretch(phase, begin, end, seconds)
            for (begin, _), phase, end, seconds in zip(self.marks, _named(self.marks), ends, self.seconds, strict=True)
        ]

    def _leave(self, end: int) -> None:
        """Keeps what follows the mark at this place, and what is there then."""
        split, after = self.marks[end + 1][0], end + 1
        earlier = replace(self, changes=self.changes[:split], marks=self.marks[:after], seconds=self.seconds[:after])
        buffers, live = Buffers(earlier), {}
        for change in earlier.changes:
            if change.size > 0:
                live[change.number] = change
            else:
                del live[change.number]
        released = {change.number for change in self.changes[self.marks[-1][0] :]}
        ended = {change.number for change in self.changes[split:] if change.size < 0}
        for number in live:
            # Made in forward, by the model, for itself; or never ended, as the gradient of a batch.
            kept = (number in buffers.owners and number not in released) or number not in ended
            kind = buffers.kinds[number] if kept else GRADIENTS
            self.left[number] = kind, buffers.places[number]
        self.changes = [*live.values(), *self.changes[split:]]
        self.marks = [(place - split + len(live), phase) for place, phase in self.marks[after:]]
        self.seconds = self.seconds[after:]

    @property
    def begins_with(self) -> list[int]:
        """Bytes as the step begins, by kind."""
        now = [0, 0, 0, 0]
        for number, size, _ in self.changes[: len(self.left)]:
            now[self.left[number][0]] += size
        return now

    def begin(self, *phases: Phase) -> int:
        """Where the first of these phases begins that there is."""
        begins = {stretch.phase: stretch.begin for stretch in reversed(self.stretches)}
        return next(begins[phase] for phase in phases if phase in begins)


def _named(marks: list[tuple[int, Phase]]) -> list[Phase]:
    """The phases, with what forward does after each layer, and backward after each, named so."""
    backward = next(place for place, (_, phase) in enumerate(marks) if phase == HEAD_BACKWARD)
    of_layers = [place for place, (_, phase) in enumerate(marks) if phase.layer is not None]
    if not of_layers:
        return [phase for _, phase in marks]
    last = max((place for place in of_layers if place < backward), default=0)
    found, before = [], None
    for place, (_, phase) in enumerate(marks):
        if phase == FORWARD and place > last:
            phase = HEAD_FORWARD
        elif phase == BACKWARD and place > of_layers[-1]:
            phase = EMBEDDINGS_BACKWARD
        elif phase in (FORWARD, BACKWARD) and before is not None:
            phase = Phase(AFTER_FORWARD if phase == FORWARD else AFTER_BACKWARD, before)
        else:
            before = before if phase.layer is None else phase.layer
        found.append(phase)
    return found


class Buffers:
    """What each buffer is for, by its number, as the whole step shows."""

    def __init__(self, trace: Trace) -> None:
        self.kinds: dict[int, int] = {}
        """A place in `Parts`."""
        self.owners: dict[int, int] = {}
        """The layer, or the place outside of layers, that keeps a buffer from forward to backward."""
        self.places: dict[int, int] = {}
        """The layer in whose stretch it was allocated."""
        after_end = trace.begin(END)
        released = {c.number for c in trace.changes[after_end:] if c.size < 0}
        first = {c.number for c in trace.changes[:after_end] if c.size > 0}
        self.gradients = released & first
        for number, (kind, place) in trace.left.items():
            self.kinds[number], self.places[number] = kind, place
            if kind == GRADIENTS:
                self.gradients.add(number)
        self._read(trace, _shared(trace))

    def _read(self, trace: Trace, shared: set[int]) -> None:
        of_layers, backward = trace.begin(HEAD_FORWARD, HEAD_BACKWARD), trace.begin(HEAD_BACKWARD)
        of_head = next(
            (s.begin for s in trace.stretches if s.begin >= of_layers and s.phase not in (HEAD_FORWARD, HEAD_BACKWARD)),
            backward,
        )
        inside = False
        for stretch in trace.stretches:
            inside = inside or stretch.phase.layer is not None
            here = place_of(stretch.phase, inside)
            for index in range(stretch.begin, stretch.end):
                number, size, _ = trace.changes[index]
                if size > 0:
                    made = SAVED_ACTIVATIONS if index < of_layers else LOSS_HEAD if index < of_head else TRANSIENTS
                    self.kinds[number] = GRADIENTS if number in self.gradients else made
                    self.places[number] = here
                    if index < backward:
                        self.owners[number] = here if here == AFTER else BETWEEN  # until it is released
                elif number in self.owners:
                    if index < backward or number in self.gradients:
                        del self.owners[number]
                    elif number not in shared and self.places[number] != AFTER:
                        self.owners[number] = here


def place_of(phase: Phase, inside: bool) -> int:
    """The layer of a phase, or its place outside of the layers. inside: whether a layer has run."""
    if phase.name in (AFTER_FORWARD, AFTER_BACKWARD):
        return BETWEEN
    if phase.layer is not None:
        return phase.layer
    if phase in (HEAD_FORWARD, HEAD_BACKWARD):
        return AFTER
    return EMBEDDINGS if phase == EMBEDDINGS_BACKWARD or (phase == FORWARD and not inside) else BETWEEN


def _shared(trace: Trace) -> set[int]:
    """What several layers are given."""
    receivers: Counter[int] = Counter(number for _, number in trace.received)
    return {number for number, times in receivers.items() if times > 1}


def changes_of(
    opened: OpenLedger, marks: list[tuple[int, Phase]], end: int
) -> tuple[list[Change], list[tuple[int, Phase]]]:
    """The allocations and releases of a ledger, and marks of its events as places among them, up to one
    of the marks."""
    ledger = opened.ledger
    changes: list[Change] = []
    before = []  # how many of them there are before each event
    for event in ledger.events:
        before.append(len(changes))
        if event[0] in ("allocation", "release"):
            number, size = event[3][:2]
            changes.append(Change(number, size if event[0] == "allocation" else -size, _in_words(ledger.name(event))))
    before.append(len(changes))
    places = [*(before[min(place, len(before) - 1)] for place, _ in marks), len(changes)]
    return changes[: places[end]], [(place, phase) for place, (_, phase) in zip(places, marks[:end], strict=False)]


_WORDS = {
    "d": "gradient of a weight",
    "cast": "a weight cast to the type of products",
    "gu": "gate and up",
    "h": "the hidden values",
    "in of": "a projection's input",
    "o": "the output of attention",
    "qkv": "q, k and v",
    "x": "the input",
}


def _in_words(name: str) -> str:
    """What our ops call a value, for who has not read them: "d qkv" is "gradient of q, k and v"."""
    of = name.removeprefix("d ")
    return ("gradient of " if of != name else "") + _WORDS.get(of, of)
