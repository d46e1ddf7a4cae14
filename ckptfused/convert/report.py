"""What `convert` did to each layer, and what it saves: a table for a person, and data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerReport:
    """One layer of a converted model."""

    name: str
    """Where it is in the model, as in `named_modules()`."""
    layer: str
    """Its class."""
    family: str | None
    """The adapter that reads it, None if there is none."""
    path: str
    """"fused": one op. "part": halves fused, the rest checkpointed. "generic": its own forward, checkpointed."""
    reason: str = ""
    """Why it is not fused, or not whole."""
    before: float | None = None
    """Bytes a token that its own forward saves for backward; None where this could not be counted."""
    after: float | None = None
    """Bytes a token saved now."""


@dataclass(frozen=True)
class Report:
    """What `convert` did. As a string, a table in which equal neighbours share a line."""

    layers: tuple[LayerReport, ...]
    keep: str
    notes: tuple[str, ...] = ()

    @property
    def fused(self) -> int:
        """How many layers run as one op."""
        return sum(layer.path == "fused" for layer in self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return "ckptfused.convert: no layers found"
        rows = [("layers", "class", "family", "path", "bytes/token", "why")]
        for group in _groups(self.layers):
            first = group[0]
            name = first.name if len(group) == 1 else f"{first.name} … {group[-1].name}"
            size = " → ".join("?" if v is None else f"{v:,.0f}" for v in (first.before, first.after))
            rows.append((name, first.layer, first.family or "–", first.path, size, first.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows]
        paths = ", ".join(f"{count} {path}" for path, count in Counter(x.path for x in self.layers).items())
        return "\n".join([*lines, f"{len(self.layers)} layers: {paths}; keep={self.keep!r}", *self.notes])


def _groups(layers: tuple[LayerReport, ...]) -> list[list[LayerReport]]:
    """Neighbours that differ in nothing but their name."""
    groups: list[list[LayerReport]] = []
    last: tuple[object, ...] = ()
    for layer in layers:
        key = (layer.layer, layer.family, layer.path, layer.reason, layer.before, layer.after)
        if groups and key == last:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = key
    return groups
