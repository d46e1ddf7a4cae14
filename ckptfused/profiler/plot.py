"""A step's timeline as a picture, and what pictures share. profile: a `Profile`, which this is a part of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import hypot
from pathlib import Path
from typing import Any

from ckptfused.profiler.phases import KINDS
from ckptfused.simulate.cards import CARDS, GIB
from ckptfused.sizes import byte_unit, second_unit, size

COLOURS = ("#4c566a", "#81a1c1", "#a3be8c", "#ebcb8b", "#d08770", "#bf616a")
FAR = 1.5
"""Multiple of what a picture shows beyond which a value is said in the margin."""
_BESIDE = 15
"""Points at most between a name and what it names; from further away a line leads there."""
_LETTER = 0.0085
"""Share of the width that a letter of a phase's name takes."""


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
"""The box of a text through which no line runs."""


def plot(profile: Any, path: str | Path) -> None:
    """Writes a PNG: bytes by kind, stacked, over the time of the step, with forward, backward and optimizer marked.

    **Raises** `ModuleNotFoundError` without matplotlib, `ValueError` for a profile without a timeline.
    """
    if not profile.timeline:
        raise ValueError(
            "profile: expected one that profile() returned, whose step ran to its end, got one without a timeline"
        )
    figure, axes = canvas(10, 5)
    (unit, name), end = byte_unit(profile.peak), max(profile.timeline[-1].seconds, 1e-9)
    scale, of_time = second_unit(end)
    times = [moment.seconds / scale for moment in profile.timeline]
    levels = [[moment.bytes[kind] / unit for moment in profile.timeline] for kind in range(len(KINDS))]
    axes.stackplot(times, levels, labels=KINDS, colors=COLOURS, step="post")
    for when, _ in profile.marks:
        axes.axvline(when / scale, color="black", linewidth=0.8, linestyle=":")
    for place, phase in _side_by_side([(when / end, phase) for when, phase in profile.marks if phase != "end"]):
        axes.text(place, 1.01, f" {phase}", transform=axes.transAxes, fontsize=9)
    top = profile.peak * 1.08
    lines = [(profile.peak, f"peak {size(profile.peak)}", "-", "left")]
    card = CARDS.get(profile.device)
    if card is not None:
        has, said = card.memory * GIB, f"one {card.name} has {card.memory:g} GiB"
        top = max(top, has * 1.05) if has < FAR * profile.peak else top
        lines += [(has, said, "--", "right")] if has <= top else []
        if has > top:
            axes.text(0.995, 0.985, f"{said} ↑", transform=axes.transAxes, fontsize=8, ha="right", va="top")
    for level, said, style, side in lines:
        axes.axhline(level / unit, color="black", linewidth=0.8, linestyle=style)
        at = 0.005 if side == "left" else 0.995
        where: Any = {"xycoords": axes.get_yaxis_transform(), "va": "bottom", "ha": side, "bbox": _PLAIN}
        axes.annotate(said, (at, level / unit), (0, 2), textcoords="offset points", fontsize=8, **where)
    axes.set(xlabel=of_time, ylabel=name, xlim=(0, end / scale), ylim=(0, top / unit))
    figure.suptitle(f"A step {profile.way} for {profile.device}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(KINDS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _side_by_side(names: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Names at their places, shares of the width, or as near to them as they all fit beside each other."""
    found, limit = [], 1.0
    for place, name in reversed(names):
        limit = min(place, limit - _LETTER * (len(name) + 1))
        found.append((limit, name))
    names, limit = found[::-1], 0.0
    found = []
    for place, name in names:
        found.append((max(place, limit), name))
        limit = found[-1][0] + _LETTER * (len(name) + 1)
    return found


def _gap(box: Any, x: float, y: float) -> float:
    """How far a box is from a point."""
    return hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))


# From a point, in points: beside it, then ever further above, below and to the sides.
_PLACES = sorted(
    (
        (across * aside, up * (far - (2 if far == 5 else 0)))
        for aside, far, across, up in product((5, 50, 95, 140), range(5, 200, 9), (1, -1), (1, -1))
    ),
    key=lambda place: (hypot(*place), -place[0], -place[1]),
)


def label_points(axes: Any, points: Iterable[tuple[str, float, float]]) -> None:
    """Writes names beside points, (name, x, y), where they cover neither another name, a point nor a curve of the axes:
    the nearest such place of a few, or the one within the axes where they cover least. It is nearer to its own point
    than to others, or a line leads to that. Points in one place have one label."""
    from matplotlib.transforms import Bbox

    names: dict[tuple[float, float], list[str]] = {}
    for name, x, y in points:
        names.setdefault((x, y), []).append(name)
    places = [tuple(axes.transData.transform(point)) for point in names]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    drawn = [line for line in axes.lines if line.get_linestyle() != "None"]
    curves = [line.get_transform().transform_path(line.get_path()) for line in drawn]
    for point, found in names.items():
        text = axes.annotate(", ".join(found), point, (0, 0), textcoords="offset points", fontsize=8)
        text.set_in_layout(False)  # the axes keep the size for which places are found

        def covered(
            place: tuple[float, float], text: Any = text, point: tuple[float, float] = point
        ) -> tuple[Any, ...]:
            """What a name in this place would cover, and by how much it would leave the axes."""
            text.set(ha="left" if place[0] > 0 else "right", va="bottom" if place[1] > 0 else "top")
            text.xyann = place
            box, own = text.get_window_extent(axes.figure.canvas.get_renderer()), axes.bbox
            beyond = max(own.x0 - box.x0, box.x1 - own.x1, own.y0 - box.y0, box.y1 - own.y1, 0)
            crossed = sum(curve.intersects_bbox(box, filled=False) for curve in curves)
            nearest = min(places, key=lambda other: _gap(box, *other))
            strange = hypot(*place) <= _BESIDE and nearest != tuple(axes.transData.transform(point))
            return beyond, sum(box.overlaps(other) for other in taken) + crossed + strange, box

        best = None
        for place in _PLACES:
            beyond, covers, _ = covered(place)
            if best is None or (beyond, covers) < best[:2]:
                best = beyond, covers, place
            if not beyond and not covers:
                break
        taken.append(covered(best[2])[2])  # type: ignore[index]
        if hypot(*text.xyann) > _BESIDE:
            line = {"arrowstyle": "-", "linewidth": 0.5, "color": "grey"}
            axes.annotate("", point, text.xyann, textcoords="offset points", arrowprops=line)
