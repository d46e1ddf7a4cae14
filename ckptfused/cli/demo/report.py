"""The demo's table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ckptfused.cli.demo.job import Result

MIB = 2.0**20
VARIANT_COLOURS = ("#4c566a", "#a3a9b5", "#e0a458", "#c8553d")


def results_table(results: Sequence[Result]) -> Table:
    """One row a variant; ratios are against the first."""
    first = results[0]
    view = Table(title="Saved for backward; peak above the resting process")
    view.add_column("variant", no_wrap=True)
    for column in ("saved", "peak memory", "median step", "final loss"):
        view.add_column(column, justify="right")
    for result in results:
        view.add_row(
            result.variant,
            f"{result.saved_bytes / MIB:.1f} MiB ({result.saved_bytes / first.saved_bytes:.2f}×)",
            f"{result.peak_bytes / MIB:.0f} MiB",
            f"{result.step_time * 1e3:.0f} ms ({result.step_time / first.step_time:.2f}×)",
            f"{result.final_loss:.4f}",
        )
    return view


def texts(results: Sequence[Result]) -> Table:
    """What each model writes; variants that write the same share a row."""
    view = Table(title="What they write", show_lines=True)
    view.add_column("variant", no_wrap=True)
    view.add_column("text")
    for text in dict.fromkeys(result.text for result in results):
        names = [result.variant for result in results if result.text == text]
        view.add_row("\n".join(names), Text(text))
    return view


def results_picture(results: Sequence[Result], path: Path, guess: float) -> None:
    """Loss curves on the left, beside the loss of a `guess` by frequencies; memory and time bars on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, memory, time) = plt.subplots(1, 3, figsize=(14, 4), width_ratios=(2, 1, 1), layout="constrained")
    for index, (result, colour) in enumerate(zip(results, VARIANT_COLOURS, strict=False)):
        style = "--" if index % 2 else "-"
        curves.plot(result.losses, style, color=colour, label=result.variant, linewidth=2 - 0.3 * index)
    curves.axhline(guess, color="#888888", linestyle=":", linewidth=1, label="byte frequencies alone")
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="the same curve, four ways")
    curves.legend(frameon=False)

    names = [result.variant.replace(" ", "\n").replace(".checkpoint", "\n.checkpoint") for result in results]
    places = range(len(results))
    memory.bar(
        [x - 0.2 for x in places], [r.saved_bytes / MIB for r in results], 0.4, color=VARIANT_COLOURS, label="saved"
    )
    memory.bar([x + 0.2 for x in places], [r.peak_bytes / MIB for r in results], 0.4, color=VARIANT_COLOURS, alpha=0.45)
    memory.set(title="saved for backward | peak (pale), MiB", xticks=list(places))
    time.bar(places, [r.step_time * 1e3 for r in results], 0.6, color=VARIANT_COLOURS)
    time.set(title="median step, ms", xticks=list(places))
    for axes in (memory, time):
        axes.set_xticklabels(names, fontsize=7)
    for axes in (curves, memory, time):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
