"""What a step left behind that one that saves everything did not: findings about state that a replay moves again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ckptfused.doctor.findings import Finding, joined
from ckptfused.doctor.steps import StepRun, alike

_STATE = {
    "buffers": (
        "its buffers have",
        "use ckptfused.checkpoint or ckptfused.convert, which update buffers once; or momentum=0 in the replay",
    ),
    "held": (
        "its parameters or tensors have",
        "keep averages and codebooks in buffers, which ckptfused.checkpoint and ckptfused.convert update once",
    ),
}


def moved_twice(configured: StepRun, reference: StepRun, name: Callable[[Any], str]) -> Iterator[Finding]:
    """Buffers, parameters and tensors that modules hold which have other values after the two steps."""
    regions = configured.recorder.regions
    replayed = {name(event.module) for region in regions for replay in region.replays for event in replay}
    for kind, (what, mend) in _STATE.items():
        wrong: dict[str, list[str]] = defaultdict(list)
        saved = getattr(reference, kind)
        for full, value in getattr(configured, kind).items():
            if saved.get(full, value) != value:
                place, _, last = name(full).rpartition(".")
                wrong[place].append(last)
        for_all: dict[tuple[str, str], list[str]] = defaultdict(list)
        for place, names in wrong.items():
            twice = "updated twice, in forward and again in its replay" if place in replayed else "another value"
            for_all[", ".join(names), twice].append(place)
        for (values, twice), places in for_all.items():
            text = f"after a step, {what} a wrong value ({twice}): {values}"
            yield Finding("error", joined(places), text, mend)


def attributes(configured: StepRun, reference: StepRun, name: Callable[[Any], str]) -> Iterator[Finding]:
    """Numbers and texts that modules hold which the two steps left with other values."""
    a, b = configured.attributes, reference.attributes
    for full, value in a.items():
        if not alike(value, b.get(full)):
            yield Finding(
                "warning",
                name(full).rpartition(".")[0] or "the model",
                f"its attribute {full.rpartition('.')[2]!r} is {value!r} after a step, {b.get(full, 'as it was')!r} "
                "where everything is saved: a replay changes it again",
                "use ckptfused.checkpoint, which leaves attributes as the forward left them",
            )
