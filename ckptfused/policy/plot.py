"""A step's timeline as a picture. profile: a `Profile`, which this is a part of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptfused.policy.parts import KINDS

GIB = 2**30
COLOURS = ("#4c566a", "#81a1c1", "#a3be8c", "#ebcb8b", "#d08770", "#bf616a")


def plot(profile: Any, path: str | Path) -> None:
    """Writes a PNG: bytes by kind, stacked, over the time of the step, with forward, backward and optimizer marked.

    **Raises** `ModuleNotFoundError` without matplotlib, `ValueError` for a profile without a timeline.
    """
    if not profile.timeline:
        raise ValueError("profile: expected one of a step that ran, got one without a timeline")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = [moment.seconds * 1e3 for moment in profile.timeline]
    levels = [[moment.bytes[kind] / GIB for moment in profile.timeline] for kind in range(len(KINDS))]
    axes.stackplot(times, levels, labels=KINDS, colors=COLOURS, step="post")
    for when, name in profile.marks:
        axes.axvline(when * 1e3, color="black", linewidth=0.8, linestyle=":")
        if name != "end":
            axes.text(when * 1e3, 1.01, f" {name}", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.axhline(profile.peak / GIB, color="black", linewidth=0.8)
    axes.set(xlabel="ms", ylabel="GiB", xlim=(0, max(times[-1], 1e-6)), ylim=(0, profile.peak / GIB * 1.15))
    axes.set_title(f"{profile.way} for {profile.device}: peak {profile.peak / GIB:,.2f} GiB", loc="right", fontsize=9)
    axes.legend(loc="upper left", ncols=len(KINDS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
