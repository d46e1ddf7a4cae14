"""A step as a sequence of allocations and releases with marks of where they are, and what follows of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptfused.policy.parts import (
    BACKWARD,
    EMBEDDINGS_BACKWARD,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    KINDS,
    OPTIMIZER,
    Alive,
    LayerProfile,
    Moment,
    Parts,
    Peak,
    Phase,
)
from ckptfused.policy.result import Profile

GRADIENTS, ACTIVATIONS, LOSS_HEAD, TRANSIENTS = range(4)
"""Places in `Parts`."""
EMBEDDINGS, AFTER, BETWEEN = -1, -2, -3
"""In the place of a layer's index: what is in none."""


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
class Recording:
    """What happened in one step, in order."""

    changes: list[Change]
    marks: list[tuple[int, Phase]]
    """Where in `changes` each phase begins, up to `END`."""
    received: set[tuple[int, int]]
    """Layers, and numbers of the buffers that they are given in forward."""
    seconds: list[float]
    """Of each mark's stretch."""
    names: list[str]
    """The layers'."""
    layer_gradients: list[int]
    weights: int
    optimizer: int
    stretches: list[Stretch] = field(init=False)

    def __post_init__(self) -> None:
        ends = [begin for begin, _ in self.marks[1:]] + [len(self.changes)]
        self.stretches = [
            Stretch(phase, begin, end, seconds)
            for (begin, _), phase, end, seconds in zip(self.marks, _named(self.marks), ends, self.seconds, strict=True)
        ]

    def begin(self, *phases: Phase) -> int:
        """Where the first of these phases begins that there is."""
        begins = {stretch.phase: stretch.begin for stretch in reversed(self.stretches)}
        return next(begins[phase] for phase in phases if phase in begins)

    def profile(self, device: str, way: str, notes: tuple[str, ...] = (), **more: Any) -> Profile:
        """What the step needs. more: further fields of the profile."""
        buffers = _Buffers(self)
        layers = _layers(self, buffers)
        gradients = sum(
            change.size for change in self.changes if change.number in buffers.gradients and change.size > 0
        )
        optimizer = [s for s in self.stretches if s.phase == OPTIMIZER]
        return Profile.of_phases(
            self.weights,
            self.optimizer,
            _peaks(self, buffers),
            device=device,
            way=way,
            layers=tuple(layers[index] for index in range(len(self.names))),
            embeddings=layers[EMBEDDINGS],
            head=layers[AFTER],
            between=layers[BETWEEN],
            all_gradients=gradients,
            optimizer_transient=max((_most(self, stretch) for stretch in optimizer), default=0),
            optimizer_seconds=sum(stretch.seconds for stretch in optimizer),
            alive=_alive(self, buffers),
            timeline=tuple(_timeline(self, buffers)),
            marks=_marked(self),
            notes=notes,
            **more,
        )


def _named(marks: list[tuple[int, Phase]]) -> list[Phase]:
    """The phases, with what forward does after the last layer, and backward after its last, named so."""
    backward = next(place for place, (_, phase) in enumerate(marks) if phase == HEAD_BACKWARD)
    of_layers = [place for place, (_, phase) in enumerate(marks) if phase.layer is not None]
    if not of_layers:
        return [phase for _, phase in marks]
    last = max((place for place in of_layers if place < backward), default=0)
    found = []
    for place, (_, phase) in enumerate(marks):
        if phase == FORWARD and place > last:
            phase = HEAD
        elif phase == BACKWARD and place > of_layers[-1]:
            phase = EMBEDDINGS_BACKWARD
        found.append(phase)
    return found


class _Buffers:
    """What each buffer is for, by its number, as the whole step shows."""

    def __init__(self, recording: Recording) -> None:
        self.kinds: dict[int, int] = {}
        """A place in `Parts`."""
        self.owners: dict[int, int] = {}
        """Of what forward keeps for backward: the layer that does, or a place outside of the layers."""
        self.places: dict[int, int] = {}
        """The layer in whose stretch it was allocated."""
        after_end = recording.begin(END)
        released = {c.number for c in recording.changes[after_end:] if c.size < 0}
        first = {c.number for c in recording.changes[:after_end] if c.size > 0}
        self.gradients = released & first
        self._read(recording, _shared(recording))

    def _read(self, recording: Recording, shared: set[int]) -> None:
        of_layers, backward = recording.begin(HEAD, HEAD_BACKWARD), recording.begin(HEAD_BACKWARD)
        of_head = next(
            (s.begin for s in recording.stretches if s.begin >= of_layers and s.phase not in (HEAD, HEAD_BACKWARD)),
            backward,
        )
        inside = False
        for stretch in recording.stretches:
            inside = inside or stretch.phase.layer is not None
            here = _place(stretch.phase, inside)
            for index in range(stretch.begin, stretch.end):
                number, size, _ = recording.changes[index]
                if size > 0:
                    made = ACTIVATIONS if index < of_layers else LOSS_HEAD if index < of_head else TRANSIENTS
                    self.kinds[number] = GRADIENTS if number in self.gradients else made
                    self.places[number] = here
                    if index < backward:
                        self.owners[number] = here if here == AFTER else BETWEEN  # until it is released
                elif number in self.owners:
                    if index < backward or number in self.gradients:
                        del self.owners[number]
                    elif number not in shared and self.places[number] != AFTER:
                        self.owners[number] = here


def _place(phase: Phase, inside: bool) -> int:
    """The layer of a phase, or its place outside of the layers. inside: whether a layer has run."""
    if phase.layer is not None:
        return phase.layer
    if phase in (HEAD, HEAD_BACKWARD):
        return AFTER
    return EMBEDDINGS if phase == EMBEDDINGS_BACKWARD or (phase == FORWARD and not inside) else BETWEEN


def _shared(recording: Recording) -> set[int]:
    """What several layers are given."""
    receivers: Counter[int] = Counter(number for _, number in recording.received)
    return {number for number, times in receivers.items() if times > 1}


def _peaks(recording: Recording, buffers: _Buffers) -> list[Peak]:
    """Of each phase but the end, in which the gradients are released."""
    found: dict[Phase, Peak] = {}
    now = [0, 0, 0, 0]
    for stretch in recording.stretches:
        if stretch.phase == END:
            break
        for number, size, op in recording.changes[stretch.begin : stretch.end]:
            now[buffers.kinds[number]] += size
            if size > 0 and (stretch.phase not in found or sum(now) > sum(found[stretch.phase].parts)):
                parts: Parts = (now[0], now[1], now[2], now[3])
                found[stretch.phase] = Peak(stretch.phase, parts, op)
    return list(found.values()) or [Peak(FORWARD, (0, 0, 0, 0), "nothing")]


def _most(recording: Recording, stretch: Stretch) -> int:
    """Above what there was at its begin."""
    now = most = 0
    for change in recording.changes[stretch.begin : stretch.end]:
        now += change.size
        most = max(most, now)
    return most


class _Level:
    """How much is held, and the most of it, while one part of the model runs in one direction."""

    def __init__(self, base: int) -> None:
        self.base = base
        """Kept for backward as it begins, by others than itself if it is forward."""
        self.most = 0


def _layers(recording: Recording, buffers: _Buffers) -> dict[int, LayerProfile]:
    """By index, the places outside of the layers among them."""
    saved: Counter[int] = Counter()
    sizes = {change.number: change.size for change in recording.changes if change.size > 0}
    for number, owner in buffers.owners.items():
        saved[owner] += sizes[number]
    levels: dict[tuple[int, bool, int], _Level] = {}
    seconds: defaultdict[tuple[int, bool], float] = defaultdict(float)
    held: Counter[int] = Counter()
    total, inside, forward = 0, False, True
    for stretch in recording.stretches:
        if stretch.phase in (OPTIMIZER, END):
            break
        forward = forward and stretch.phase != HEAD_BACKWARD
        inside = inside or stretch.phase.layer is not None
        place = _place(stretch.phase, inside)
        key = (place, forward)
        seconds[key] += stretch.seconds
        # A layer that is called again, or replayed before its own backward, has the base of the first time. Between
        # layers each time is for itself.
        time = stretch.begin if place == BETWEEN else 0
        level = levels.setdefault((*key, time), _Level(held.total() - (held[place] if forward else 0)))
        for number, size, _ in recording.changes[stretch.begin : stretch.end]:
            if number in buffers.owners:
                held[buffers.owners[number]] += size
            if number not in buffers.gradients:
                total += size
                level.most = max(level.most, total)
    gradients: Counter[int] = Counter(dict(enumerate(recording.layer_gradients)))
    for number in buffers.gradients:
        if buffers.places[number] < 0:
            gradients[buffers.places[number]] += sizes[number]

    def above(place: int, way: bool) -> int:
        found = [level.most - level.base for (*key, _), level in levels.items() if key == [place, way]]
        return max(0, max(found, default=0) - (saved[place] if way else 0))

    return {
        place: LayerProfile(
            name,
            saved[place],
            above(place, True),
            above(place, False),
            gradients[place],
            seconds[place, True],
            seconds[place, False],
        )
        for place, name in _names(recording).items()
    }


def _names(recording: Recording) -> dict[int, str]:
    """Of the layers, then of the places outside of them."""
    outside = {EMBEDDINGS: "embeddings", AFTER: "loss head", BETWEEN: "between layers"}
    return dict(enumerate(recording.names)) | outside


def _alive(recording: Recording, buffers: _Buffers) -> tuple[Alive, ...]:
    """At the peak."""
    total = most = 0
    top = 0
    end = recording.begin(END)
    for index, change in enumerate(recording.changes[:end]):
        total += change.size
        if total > most:
            most, top = total, index
    live: dict[int, Change] = {}
    for change in recording.changes[: top + 1]:
        if change.size > 0:
            live[change.number] = change
        else:
            live.pop(change.number, None)
    names = _names(recording)
    found: Counter[tuple[str, str, str]] = Counter()
    for change in live.values():
        kind = KINDS[2 + buffers.kinds[change.number]]
        place = buffers.owners.get(change.number, buffers.places[change.number])
        found[kind, names[place], change.op] += change.size
    found[KINDS[0], "all", "parameters and buffers"] += recording.weights
    found[KINDS[1], "all", "optimizer state"] += recording.optimizer
    return tuple(Alive(*where, size) for where, size in found.most_common() if size > 0)


POINTS = 2000
"""Of a timeline, at most about so many."""


def _timeline(recording: Recording, buffers: _Buffers) -> Iterator[Moment]:
    """The levels of all kinds, each stretch's changes spread evenly over its time. Where they are many, of each few the
    highest."""
    few = max(1, len(recording.changes) // POINTS)
    now, clock, state = [0, 0, 0, 0], 0.0, (recording.weights, recording.optimizer)
    best: Moment | None = None
    count = 0
    yield Moment(0.0, (*state, *now))
    for stretch in recording.stretches:
        if stretch.phase == END:
            break
        length = max(1, stretch.end - stretch.begin)
        for place, change in enumerate(recording.changes[stretch.begin : stretch.end]):
            now[buffers.kinds[change.number]] += change.size
            here = Moment(clock + stretch.seconds * place / length, (*state, *now))
            best = here if best is None or sum(here.bytes) > sum(best.bytes) else best
            count += 1
            if count % few == 0:
                yield best
                best = None
        clock += stretch.seconds
    yield Moment(clock, (*state, *now))


def _marked(recording: Recording) -> tuple[tuple[float, str], ...]:
    names = {FORWARD: "forward", HEAD_BACKWARD: "backward", OPTIMIZER: "optimizer", END: "end"}
    found: dict[str, float] = {}
    clock = 0.0
    for stretch in recording.stretches:
        if stretch.phase in names:
            found.setdefault(names[stretch.phase], clock)
        clock += stretch.seconds
    return tuple((when, name) for name, when in found.items())
