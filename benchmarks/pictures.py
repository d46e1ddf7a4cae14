"""How the documents' pictures are drawn and written: the same bytes each time, as few of them as show the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib, as documents have its pictures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ckptfused", "font.family": "sans-serif"})
    return plt


def saved(figure: Any, path: Path) -> None:
    """Writes a picture, the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
    path.write_text(short(path.read_text()))


def short(svg: str) -> str:
    """The same picture with a line for each path, places to a tenth of a point, and nothing said of its making."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), " ".join(attribute[0].split()))

    svg = re.sub(r'\b(?:d|x|y|width|height|transform)="[^"]*"', rounded, svg)
    lines = [line.strip() for line in svg.splitlines() if line.strip()]
    return re.sub(r">\n(?=</)|(?<=<g>)\n", lambda found: found[0].strip(), "\n".join(lines)) + "\n"


def draw_bars(path: Path, seconds: dict[str, float], memory: tuple[str, dict[str, float], str]) -> None:
    """Two panels of bars: seconds of each variant, the last of which is ours, and (title, values, format) of memory."""
    plt = pyplot()
    colours = ["#9aa4b2", *["#5f7fb8"] * (len(seconds) - 2), "#d1603d"]
    size = (9, 0.65 + 0.42 * len(seconds))
    figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained", facecolor="white")
    for axis, (title, values, form) in zip(axes, (("seconds a step", seconds, "{:.2f} s"), memory), strict=True):
        bars = axis.barh(list(values), list(values.values()), color=colours, height=0.65)
        axis.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlim(0, max(values.values()) * 1.2)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(bottom=False, labelbottom=False, left=False)
    axes[0].invert_yaxis()
    saved(figure, path)
