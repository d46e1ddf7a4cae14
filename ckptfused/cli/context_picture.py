"""Memory against the length of a sequence, or the size of a batch, for each way of training."""

from __future__ import annotations

import argparse

from ckptfused.cli.longest_context import Longest
from ckptfused.profiler.plot import COLOURS, FAR, canvas
from ckptfused.sizes import byte_unit, size


def draw(found: dict[str, Longest], arguments: argparse.Namespace) -> None:
    """A line a way through all steps that were predicted, and a mark at the longest that fits."""
    figure, axes = canvas(8, 5)
    memory = arguments.memory
    shown = {way: [(n, peak) for n, peak in best.steps if peak <= FAR * memory] for way, best in found.items()}
    highest = max((peak for steps in shown.values() for _, peak in steps), default=memory)
    far = memory > FAR * highest
    unit, name = byte_unit(highest if far else memory)
    for i, ((way, steps), colour) in enumerate(zip(shown.items(), COLOURS, strict=False)):
        hidden = sum(_coincide(steps, later, highest) for later in [*shown.values()][i + 1 :])
        counts, peaks = [count for count, _ in steps], [peak / unit for _, peak in steps]
        axes.plot(counts, peaks, color=colour, label=way, linewidth=1.5 + 2.5 * hidden, solid_capstyle="butt")
        if found[way].tokens:
            axes.plot(found[way].tokens, found[way].profile.peak / unit, "o", color=colour, markersize=5)
    if far:
        said = f"memory, {size(memory)} ↑"
        axes.text(0.995, 0.985, said, transform=axes.transAxes, fontsize=8, ha="right", va="top")
    else:
        axes.axhline(memory / unit, color="grey", linestyle="--", label=f"memory, {size(memory)}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(
        xlabel="tokens of a sequence" if arguments.largest == "sequence" else "sequences of a batch",
        ylabel=f"peak memory of a step, {name}",
        ylim=(0, 1.25 * (highest if far else memory) / unit),
    )
    axes.set_title(f"{arguments.config}, predicted for {arguments.device}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(arguments.plot, dpi=150)


def _coincide(steps: list[tuple[int, int]], later: list[tuple[int, int]], highest: int) -> bool:
    """Whether one line hides another, which is then seen on both its sides."""
    peaks = dict(later)
    return any(abs(peak - peaks[count]) < 0.01 * highest for count, peak in steps if count in peaks)
