"""What follows of a recorded step: the profile, by layer, by phase and by moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from ckptfused.profiler.phases import (
    END,
    FORWARD,
    HEAD_BACKWARD,
    KINDS,
    OPTIMIZER,
    Alive,
    LayerProfile,
    Moment,
    PartBytes,
    Peak,
    Phase,
)
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import TrainingStep
from ckptfused.profiler.trace import AFTER, BETWEEN, EMBEDDINGS, GRADIENTS, Buffers, Change, Stretch, Trace, place_of
from ckptfused.simulate.autocast import autocast_name


def profile_of(trace: Trace, device: str, way: str, step: TrainingStep, **more: Any) -> Profile:
    """What the step needs. more: further fields of the profile."""
    buffers = Buffers(trace)
    layers = _layers(trace, buffers)
    at_end = trace.changes[: trace.begin(END)]
    gradients = sum(change.size for change in at_end if change.number in buffers.gradients)
    optimizer = [s for s in trace.stretches if s.phase == OPTIMIZER]
    return Profile.of_phases(
        trace.weights,
        trace.optimizer,
        _peaks(trace, buffers),
        device=device,
        way=way,
        layers=tuple(layers[index] for index in range(len(trace.names))),
        embeddings=layers[EMBEDDINGS],
        head=layers[AFTER],
        between=layers[BETWEEN],
        all_gradients=gradients,
        left=sum(trace.begins_with) - trace.begins_with[GRADIENTS],
        optimizer_transient=max((_most(trace, stretch) for stretch in optimizer), default=0),
        optimizer_seconds=sum(stretch.seconds for stretch in optimizer),
        alive=_alive(trace, buffers),
        timeline=tuple(_timeline(trace, buffers)),
        marks=_marked(trace),
        autocast=autocast_name(step.autocast),
        gradient_accumulation_steps=step.gradient_accumulation_steps,
        release=step.release,
        **more,
    )


def _peaks(trace: Trace, buffers: Buffers) -> list[Peak]:
    """Peaks of each phase but the end, in which the gradients are released."""
    found: dict[Phase, Peak] = {}
    now = trace.begins_with
    for stretch in trace.stretches:
        if stretch.phase == END:
            break
        for number, size, op in trace.changes[stretch.begin : stretch.end]:
            now[buffers.kinds[number]] += size
            if size > 0 and (stretch.phase not in found or sum(now) > sum(found[stretch.phase].parts)):
                parts: PartBytes = (now[0], now[1], now[2], now[3])
                found[stretch.phase] = Peak(stretch.phase, parts, op)
    return list(found.values()) or [Peak(FORWARD, (now[0], now[1], now[2], now[3]), "nothing")]


def _most(trace: Trace, stretch: Stretch) -> int:
    """Above what there was at its begin."""
    now = most = 0
    for change in trace.changes[stretch.begin : stretch.end]:
        now += change.size
        most = max(most, now)
    return most


class _Level:
    """How much is held, and the most of it, while one part of the model runs in one direction."""

    def __init__(self, base: int) -> None:
        self.base = base
        """Kept for backward as it begins, by others than itself if it is forward."""
        self.most = 0


def _layers(trace: Trace, buffers: Buffers) -> dict[int, LayerProfile]:
    """By index, the places outside of the layers among them."""
    saved: Counter[int] = Counter()
    sizes = {change.number: change.size for change in trace.changes if change.size > 0}
    for number, owner in buffers.owners.items():
        saved[owner] += sizes[number]
    levels: dict[tuple[int, bool, int], _Level] = {}
    seconds: defaultdict[tuple[int, bool], float] = defaultdict(float)
    held: Counter[int] = Counter()
    total, inside, forward = 0, False, True
    for stretch in trace.stretches:
        if stretch.phase in (OPTIMIZER, END):
            break
        forward = forward and stretch.phase != HEAD_BACKWARD
        inside = inside or stretch.phase.layer is not None
        place = place_of(stretch.phase, inside)
        key = (place, forward)
        seconds[key] += stretch.seconds
        # A layer that is called again, or replayed before its own backward, has the base of the first time. Between
        # layers each time is for itself.
        time = stretch.begin if place == BETWEEN else 0
        level = levels.setdefault((*key, time), _Level(held.total() - (held[place] if forward else 0)))
        for number, size, _ in trace.changes[stretch.begin : stretch.end]:
            if number in buffers.owners:
                held[buffers.owners[number]] += size
            if number not in buffers.gradients:
                total += size
                level.most = max(level.most, total)
    gradients: Counter[int] = Counter(dict(enumerate(trace.layer_gradients)))
    for number, size, _ in trace.changes[: trace.begin(END)]:
        if number in buffers.gradients and buffers.places[number] < 0:
            gradients[buffers.places[number]] += size

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
        for place, name in _names(trace).items()
    }


def _names(trace: Trace) -> dict[int, str]:
    """Names of the layers, then of the places outside of them."""
    outside = {EMBEDDINGS: "embeddings", AFTER: "loss head", BETWEEN: "between layers"}
    return dict(enumerate(trace.names)) | outside


def _alive(trace: Trace, buffers: Buffers) -> tuple[Alive, ...]:
    """At the peak."""
    total = most = 0
    top = 0
    end = trace.begin(END)
    for index, change in enumerate(trace.changes[:end]):
        total += change.size
        if total > most:
            most, top = total, index
    live: dict[int, Change] = {}
    for change in trace.changes[: top + 1]:
        if change.size > 0:
            live[change.number] = change
        else:
            live.pop(change.number, None)
    names = _names(trace)
    found: Counter[tuple[str, str, str]] = Counter()
    for change in live.values():
        kind = KINDS[2 + buffers.kinds[change.number]]
        place = buffers.owners.get(change.number, buffers.places[change.number])
        found[kind, names[place], change.op] += change.size
    found[KINDS[0], "all", "parameters and buffers"] += trace.weights
    found[KINDS[1], "all", "optimizer state"] += trace.optimizer
    return tuple(Alive(*where, size) for where, size in found.most_common() if size > 0)


POINTS = 2000
"""The most points of a timeline, about."""


def _timeline(trace: Trace, buffers: Buffers) -> Iterator[Moment]:
    """The levels of all kinds, each stretch's changes spread evenly over its time. Where they are many, of each few the
    highest."""
    few = max(1, len(trace.changes) // POINTS)
    now, clock, state = trace.begins_with, 0.0, (trace.weights, trace.optimizer)
    best: Moment | None = None
    count = 0
    yield Moment(0.0, (*state, *now))
    for stretch in trace.stretches:
        if stretch.phase == END:
            break
        length = max(1, stretch.end - stretch.begin)
        for place, change in enumerate(trace.changes[stretch.begin : stretch.end]):
            now[buffers.kinds[change.number]] += change.size
            here = Moment(clock + stretch.seconds * place / length, (*state, *now))
            best = here if best is None or sum(here.bytes) > sum(best.bytes) else best
            count += 1
            if count % few == 0:
                yield best
                best = None
        clock += stretch.seconds
    yield Moment(clock, (*state, *now))


def _marked(trace: Trace) -> tuple[tuple[float, str], ...]:
    names = {FORWARD: "forward", HEAD_BACKWARD: "backward", OPTIMIZER: "optimizer", END: "end"}
    found: dict[str, float] = {}
    clock = 0.0
    for stretch in trace.stretches:
        if stretch.phase in names:
            found.setdefault(names[stretch.phase], clock)
        clock += stretch.seconds
    return tuple((when, name) for name, when in found.items())
