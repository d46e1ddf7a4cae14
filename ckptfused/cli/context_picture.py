"""Memory against the length of a sequence, or the size of a batch, for each way of training."""

from __future__ import annotations

import argparse

from ckptfused.cli.longest_context import Longest
from ckptfused.profiler.plot import COLOURS, canvas
from ckptfused.sizes import byte_unit, size


def draw(found: dict[str, Longest], arguments: argparse.Namespace) -> None:
    """A line a way through all steps that were predicted, and a mark at the longest that fits."""
    figure, axes = canvas(8, 5)
    unit, name = byte_unit(arguments.memory)
    for (way, best), colour in zip(found.items(), COLOURS, strict=False):
        steps = [(count, peak / unit) for count, peak in best.steps if peak <= 1.5 * arguments.memory]
        axes.plot([count for count, _ in steps], [peak for _, peak in steps], color=colour, label=way)
        if best.tokens:
            axes.plot(best.tokens, best.profile.peak / unit, "o", color=colour, markersize=5)
    axes.axhline(arguments.memory / unit, color="grey", linestyle="--", label=f"memory, {size(arguments.memory)}")
    what = "tokens of a sequence" if arguments.largest == "sequence" else "sequences of a batch"
    axes.set(
        xscale="log", xlabel=what, ylabel=f"peak memory of a step, {name}", ylim=(0, 1.25 * arguments.memory / unit)
    )
    axes.set_title(f"{arguments.config}, predicted for {arguments.device}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(arguments.plot, dpi=150)
