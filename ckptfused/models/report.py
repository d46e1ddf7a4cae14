"""What `convert` did to each layer, and what it saves: a table for a person, and data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfused.models.layer_mode import LayerMode
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.sizes import aligned, counted

Bytes = Any
MOST_RUNS = 8  # that a line of the table names


class _WhenRead:
    """A field of a frozen dataclass that may be given a function, which is called when the field is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __init__(self, default: Any = None) -> None:
        self._default = default

    def __get__(self, report: Any, owner: Any = None) -> Any:
        if report is None:
            return self._default
        value = vars(report)[self._name]
        if callable(value):
            value = vars(report)[self._name] = value()
        return value

    def __set__(self, report: Any, value: Any) -> None:
        vars(report)[self._name] = value


class _Read:
    """What is copied and pickled of a report has been read."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in vars(self)}


@dataclass(frozen=True)
class LayerReport(_Read):
    """One layer of a converted model, as it was then: its bytes are counted when they are read."""

    name: str
    """Where it is in the model, as in `named_modules()`."""
    layer: str
    """Its class."""
    family: str | None
    """The adapter that reads it; "derived" without one, where its code is read; None if neither does."""
    path: str
    """"fused": one op. "part": halves fused, the rest checkpointed. "generic": its own forward, checkpointed.
    "original": its own forward, as it was."""
    reason: str = ""
    """Why it is not fused, or not whole."""
    before: Bytes = _WhenRead()  # type: ignore[assignment]
    """Bytes a token that its own forward saves for backward; None where this could not be counted."""
    after: Bytes = _WhenRead()  # type: ignore[assignment]
    """Bytes a token saved now."""
    mode: LayerMode = field(default_factory=LayerMode)
    """What the policy says of it."""


@dataclass(frozen=True)
class HeadReport:
    """One language model's loss, where `loss="chunked"` was asked for."""

    name: str
    """Where the model is, as in `named_modules()`."""
    model: str
    """Its class."""
    path: str
    """"chunked": made without the logits. "original": its own."""
    reason: str = ""
    """Why it is its own."""

    def __str__(self) -> str:
        if self.path == "chunked":
            return f"{self.model}: chunked loss; in training with labels, outputs.logits is None"
        return f"{self.model}: its own loss, with all logits: {self.reason}"


@dataclass(frozen=True)
class Report(_Read):
    """What `convert` did. As a string, a table in which equal layers share a line.

    Bytes are counted when they are first read, of the layers as `convert` found them, whatever became of them since.
    For that their forwards run on tensors without data, and what they do beside is undone.
    """

    layers: tuple[LayerReport, ...]
    policy: CheckpointPolicy
    """What was asked for."""
    notes: tuple[str, ...] = _WhenRead(())  # type: ignore[assignment]
    heads: tuple[HeadReport, ...] = ()
    peak: int | None = None
    """Bytes at the peak of a step, predicted, where a budget was given."""

    @property
    def fused(self) -> int:
        """How many layers run as one op."""
        return sum(layer.path == "fused" for layer in self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return "\n".join(["ckptfused.convert: no layers found", *map(str, self.heads), *self.notes])
        differ = len({layer.mode for layer in self.layers}) > 1
        rows = [("layers", "class", "family", "path", "bytes/token", *(["mode"] if differ else []), "why")]
        for group in _groups(self.layers):
            first = self.layers[group[0]]
            size = " → ".join("not counted" if v is None else f"{v:,.0f}" for v in (first.before, first.after))
            size = size if first.before is not None or first.after is not None else "not counted"
            names = _names(group, self.layers)
            mode = [str(first.mode)] if differ else []
            rows.append((names, first.layer, first.family or "–", first.path, size, *mode, first.reason))
        paths = ", ".join(f"{count} {path}" for path, count in Counter(x.path for x in self.layers).items())
        return "\n".join(
            [
                *aligned(rows),
                f"{counted(len(self.layers), 'layer')}: {paths}; {self.policy}",
                *map(str, self.heads),
                *self.notes,
            ]
        )


def _groups(layers: tuple[LayerReport, ...]) -> list[list[int]]:
    """The places of layers that differ in nothing but their name, neighbours or not, by the first of each group."""
    groups: dict[LayerReport, list[int]] = {}
    for place, layer in enumerate(layers):
        groups.setdefault(replace(layer, name=""), []).append(place)
    return list(groups.values())


def _names(group: list[int], layers: tuple[LayerReport, ...]) -> str:
    """The names of a group: its ends where these are neighbours, else each run of neighbours."""
    names = [layers[place].name for place in group]
    if group[-1] - group[0] == len(group) - 1:
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    starts = [i for i in range(len(group)) if i == 0 or group[i] != group[i - 1] + 1]
    runs = [names[i:j] for i, j in zip(starts, [*starts[1:], len(group)], strict=True)]
    if len(runs) > MOST_RUNS:
        runs[MOST_RUNS - 2 : -1] = [["…"]]
    text, stem = "", None
    for run in runs:
        for name, between in ((run[0], ","), *([(run[-1], "…")] if len(run) > 1 else [])):
            before, _, last = name.rpartition(".")
            text += (between if text else "") + (last if before == stem or not before else name)
            stem = before or stem
    return text
