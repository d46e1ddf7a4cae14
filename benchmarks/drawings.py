"""The documents' pictures of results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.benchmark import MIB
from benchmarks.committed import case_of, seconds
from benchmarks.pictures import draw_bars, pyplot, saved
from benchmarks.policies import NONE, THEIRS, above
from benchmarks.step_ways import CHECKPOINT, EAGER, OURS
from ckptfused.profiler.plot import label_points

ENCODER_ROWS = {
    "nn.TransformerEncoderLayer": "`nn.TransformerEncoderLayer`",
    "under torch.utils.checkpoint": "… under `torch.utils.checkpoint`",
    "FusedCheckpointBlock": "… class swapped for `FusedCheckpointBlock`",
}
WHOLE_ROWS = {
    "Hugging Face": "Hugging Face",
    "its gradient checkpointing": "… its gradient checkpointing",
    "its gradient checkpointing, torch's chunked loss": "… and PyTorch's chunked loss",
    'convert(model, loss="chunked")': '`convert(model, loss="chunked")`',
}
STEP_SERIES = {
    EAGER: ("eager PyTorch", "#6b7280"),
    CHECKPOINT: ("torch.utils.checkpoint", "#5f7fb8"),
    "compile": ("torch.compile", "#5b9a68"),
    OURS: ("ckptfused", "#d1603d"),
}
"""By how the names of its ways begin: what a series is called, and its colour."""


def draw_encoder(path: Path, found: dict[str, Any]) -> None:
    """Step time and peak memory of PyTorch's encoder layers."""
    _, rows, _ = case_of(found)
    peaks = {v: rows[v]["peak"] / 1e9 for v in ENCODER_ROWS}
    draw_bars(path, {v: seconds(rows, v) for v in ENCODER_ROWS}, ("peak memory of a step, GB", peaks, "{:.2f} GB"))


def draw_step(path: Path, found: dict[str, Any]) -> None:
    """Peak against time, a point for each way that was timed; a line joins those that none of their series beats."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 5.4), layout="constrained", facecolor="white")
    _, rows, _ = case_of(found)
    timed = [(name, row) for name, row in rows.items() if "median" in row]
    named: list[tuple[str, float, float]] = []
    for kind, (series, colour) in STEP_SERIES.items():
        found_of = {n: (row["peak"] / MIB, seconds(rows, n)) for n, row in timed if n.startswith(kind)}
        points = list(found_of.values())
        axis.plot(*zip(*points, strict=True), "o", color=colour, markersize=5, label=series)
        front = sorted(p for p in points if not any(o[0] <= p[0] and o[1] < p[1] for o in points))
        axis.plot(*zip(*front, strict=True), "-", color=colour, linewidth=1.2, alpha=0.6)
        named += [(name.removeprefix(OURS).strip(), *point) for name, point in found_of.items()]
    axis.set_xlabel("peak memory of a step above the weights, MiB")
    axis.set_ylabel("seconds a step")
    axis.set_ylim(0, None)
    axis.set_xlim(0, None)
    axis.margins(x=0.12)
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # where points lie is known once there is a layout
    label_points(axis, named)
    saved(figure, path)


def draw_whole(path: Path, found: dict[str, Any]) -> None:
    """Step time and peak memory of whole steps of a Llama."""
    _, rows, _ = case_of(found)
    peaks = {v: rows[v]["above_gradients"] / MIB for v in WHOLE_ROWS}
    title = "peak above weights and gradients, MiB"
    draw_bars(path, {v: seconds(rows, v) for v in WHOLE_ROWS}, (title, peaks, "{:,.0f} MiB"))


def draw_policies(path: Path, found: dict[str, Any]) -> None:
    """Memory against time, a point for each policy; those that leave layers as they were all in another colour."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained", facecolor="white")
    _, rows, _ = case_of(found)
    points = [(name, above(rows[name]), seconds(rows, name)) for name in sorted(rows, key=partial(seconds, rows))]
    for colour, plain in (("#5f7fb8", True), ("#d1603d", False)):
        series = [point[1:] for point in points if (point[0] in (NONE, THEIRS)) is plain]
        axis.plot(*zip(*series, strict=True), "o", color=colour)
    axis.set_xlabel("peak above weights, MiB")
    axis.set_ylabel("seconds a step")
    axis.margins(x=0.15, y=0.1)
    axis.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # where points lie is known once there is a layout
    label_points(axis, [("no checkpointing" if name == NONE else name, x, y) for name, x, y in points])
    saved(figure, path)
