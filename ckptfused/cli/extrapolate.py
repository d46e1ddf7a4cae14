"""A profile of a deep model from two of shallow ones, whose layers repeat."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ckptfused.profiler.phases import LayerProfile, Peak, Phase
from ckptfused.profiler.result import Profile


def extrapolated(few: Profile, more: Profile, layers: tuple[int, int, int], period: int = 1, ends: int = 1) -> Profile:
    """A step of a model with more layers, from two predictions of it with fewer.

    layers: of `few`, of `more`, and of the model: at least 2 · ends, at least one more, any, in steps of `period`,
    after which layers repeat. ends: how many periods lie at each end of the stack whose phases are not those in the
    middle. There every part of a phase is a line in the number of layers, and between the ends phases need no more than
    at one of them. Time is a line too, but on a CPU whose cache holds what a few layers need.
    """
    edge = period * ends
    less, greater, all_ = layers

    def line(a: Any, b: Any) -> Any:
        more_of_it = (b - a) * (all_ - less)
        return a + (more_of_it // (greater - less) if isinstance(a, int) else more_of_it / (greater - less))

    def places(memory: Profile, depth: int) -> dict[Phase, Peak]:
        """The phases under the names that they have in the whole model."""
        found = {}
        for peak in memory.phases:
            index = peak.phase.layer
            if index is not None and index >= depth - edge:
                found[Phase(peak.phase.name, index + all_ - depth)] = peak
            elif index is None or index < edge:
                found[peak.phase] = peak
        return found

    def part(name: str) -> LayerProfile:
        a, b = getattr(few, name), getattr(more, name)
        names = [f.name for f in fields(a) if f.name != "name"]
        # The most at a time does not grow with the layers, once there are as many as `more` has.
        sizes = {n: getattr(b, n) if n.endswith("_transient") else line(getattr(a, n), getattr(b, n)) for n in names}
        return LayerProfile(a.name, **sizes)

    fewer, others = places(few, less), places(more, greater)
    phases = []
    for phase in filter(others.__contains__, fewer):
        gradients, of_layers, head, transients = map(line, fewer[phase].parts, others[phase].parts)
        phases.append(Peak(phase, (gradients, of_layers, head, transients), others[phase].what))
    first, repeated, last = more.layers[:edge], more.layers[edge:-edge], more.layers[-edge:]
    found = (*first, *(repeated * all_)[: all_ - 2 * edge], *last)
    return Profile.of_phases(
        line(few.weights, more.weights),
        line(few.optimizer, more.optimizer),
        phases,
        device=few.device,
        autocast=few.autocast,
        gradient_accumulation_steps=few.gradient_accumulation_steps,
        release=few.release,
        layers=tuple(replace(layer, name=_renumbered(layer.name, index)) for index, layer in enumerate(found)),
        embeddings=part("embeddings"),
        head=part("head"),
        between=part("between"),
        all_gradients=line(few.all_gradients, more.all_gradients),
        optimizer_transient=line(few.optimizer_transient, more.optimizer_transient),
        optimizer_seconds=line(few.optimizer_seconds, more.optimizer_seconds),
        host=line(few.host, more.host),
        time_error=few.time_error,
        notes=few.notes,
    )


def _renumbered(name: str, index: int) -> str:
    """The name of a layer that takes another's place."""
    stem, _, _ = name.rpartition(".")
    return f"{stem}.{index}"
