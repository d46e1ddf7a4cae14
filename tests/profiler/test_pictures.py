"""Pictures: names that cover nothing, units by size, what is far away in the margin."""

from __future__ import annotations

from argparse import Namespace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from ckptfused import plan, profile
from ckptfused.cli.context_picture import draw
from ckptfused.cli.longest_context import Longest
from ckptfused.profiler.plot import _side_by_side, canvas, label_points

pytestmark = pytest.mark.once


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in order."""
    found: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: found.append(figure))
    return found


def model(width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


def texts(figure: Figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


def test_names_of_near_points_cover_one_another_nowhere() -> None:
    figure, axes = canvas(8, 5)
    points = [(f"policy number {i}", 100 + i % 3, 1.0 + 0.02 * i) for i in range(9)] + [
        ("last", 900, 3),
        ("once", 900, 3),
    ]
    axes.plot([x for _, x, _ in points], [y for *_, y in points], "o")
    curves = [axes.step([90, 110, 950], [1.3, 1.1, 0.9], where="post")[0], axes.axvline(107)]
    axes.margins(0.12)
    figure.draw_without_rendering()
    label_points(axes, points)
    names = [text for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in names]
    assert len(boxes) == 10 and names[-1].get_text() == "last, once"
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    paths = [curve.get_transform().transform_path(curve.get_path()) for curve in curves]
    assert not any(path.intersects_bbox(box, filled=False) for path in paths for box in boxes)
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)


def test_names_leave_the_axes_as_they_are_where_there_is_little_room() -> None:
    figure, axes = canvas(4, 2.5)
    points = [(f"policy {i}", 10.0 + i % 4, 1.0 + 0.01 * i) for i in range(16)]
    axes.plot([x for _, x, _ in points], [y for *_, y in points], "o")
    axes.margins(0.3)
    figure.draw_without_rendering()
    before = axes.bbox.bounds
    label_points(axes, points)
    figure.draw_without_rendering()
    assert axes.bbox.bounds == pytest.approx(before, abs=2)
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == 16
    assert all(axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1 for box in boxes)


def test_a_name_is_nearest_to_its_own_point() -> None:
    """Else a line leads there."""
    figure, axes = canvas(8, 5)
    points = [(f"policy {i}", 10.0 + 0.04 * i, 1.0 + 0.12 * (i % 2)) for i in range(12)] + [("far", 12.0, 3.0)]
    axes.plot([x for _, x, _ in points], [y for *_, y in points], "o")
    axes.margins(0.3)
    figure.draw_without_rendering()
    label_points(axes, points)
    names = {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text()}
    led = [text.xy for text in axes.texts if not text.get_text()]
    places = {name: axes.transData.transform((x, y)) for name, x, y in points}
    for name, x, y in points:
        if (x, y) not in led:
            box = names[name]
            near = {
                other: max(box.x0 - px, px - box.x1, 0) + max(box.y0 - py, py - box.y1, 0)
                for other, (px, py) in places.items()
            }
            assert min(near, key=lambda other: near[other]) == name
    assert led  # not all have room beside them


def test_a_far_memory_does_not_squeeze_the_curves(figures: list[Figure]) -> None:
    """Bytes of a few MiB on a card of 80 GiB."""
    steps = tuple((1 << n, n << 20) for n in range(8, 12))
    found: Any = {"as it is": Longest(2048, SimpleNamespace(peak=11 << 20), "", steps)}  # type: ignore[arg-type]
    for memory in (80 << 30, 12 << 20):
        draw(found, Namespace(memory=memory, largest="sequence", config="m", device="h100", plot="c.png"))
    far, near = figures
    assert "memory, 80.00 GiB ↑" in texts(far) and "memory, 12.00 MiB ↑" not in texts(near)
    for figure in figures:
        assert figure.axes[0].get_ylabel().endswith("MiB") and figure.axes[0].get_ylim()[1] < 20
        figure.draw_without_rendering()
        assert "1,024" in [text.get_text() for text in figure.axes[0].get_xticklabels()]


def test_a_far_budget_is_in_the_margin(figures: list[Figure]) -> None:
    x = torch.empty(64, 32, device="meta")
    for budget in (None, "500KiB"):
        found = plan(model(32), x, budget, torch.optim.SGD, "h100")
        found.plot("plan.png")
    far = figures[0]
    assert "budget, 75.05 GiB →" in texts(far) and "one h100, 79.00 GiB →" in texts(far)
    for figure in figures:
        low, high = figure.axes[0].get_xlim()
        assert high < 1024 and "KiB" in figure.axes[0].get_xlabel() and "µs" in figure.axes[0].get_ylabel()
        assert "no checkpointing" in texts(figure) and "none" not in texts(figure)
        peaks = [point.peak / 1024 for point in found.standard]
        assert max(peaks) - min(peaks) > 0.1 * (high - low)


def test_a_timeline_has_the_cards_line_and_units_by_size(figures: list[Figure]) -> None:
    for rows in (64, 1 << 26):
        profile(model(64), torch.empty(rows, 64, device="meta"), torch.optim.SGD, "rtx4090").plot("step.png")
    small, large = figures
    assert small.axes[0].get_ylabel() == "KiB" and large.axes[0].get_ylabel() == "GiB"
    assert "one rtx4090 has 23.5 GiB ↑" in texts(small) and "peak" in texts(small)
    assert 23.5 in [line.get_ydata()[0] for line in large.axes[0].lines]
    figure = large
    figure.draw_without_rendering()
    phases = [text for text in figure.axes[0].texts if text.get_text().strip() in ("forward", "backward", "optimizer")]
    assert len(phases) == 3
    boxes = [text.get_window_extent() for text in (*phases, figure._suptitle)]  # type: ignore[attr-defined]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize("places", [(0, 0.03, 0.97), (0, 0.9, 0.95), (0, 0.01, 0.02), (0, 0.3, 0.8)])
def test_names_of_narrow_phases_are_beside_one_another(places: tuple[float, ...]) -> None:
    """A name begins at its phase, or as near to it as all of them fit."""
    figure, axes = canvas(10, 5)
    names = ("forward", "backward", "optimizer")
    found = _side_by_side(list(zip(places, names, strict=True)))
    if places[1:] == (0.3, 0.8):
        assert [place for place, _ in found] == list(places)
    drawn = [axes.text(place, 1.01, f" {name}", transform=axes.transAxes, fontsize=9) for place, name in found]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in drawn]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 1 for box in boxes)


def test_a_peak_just_below_the_card_is_said_beside_it(figures: list[Figure]) -> None:
    with torch.device("meta"):
        wide = nn.Linear(16384, 16384, bias=False)
    found = profile(wide, torch.empty(16384 * 11, 16384, device="meta"), optimizer=torch.optim.SGD, device="rtx4090")
    found.plot("step.png")
    figures[0].draw_without_rendering()
    levels = [text for text in figures[0].axes[0].texts if "GiB" in text.get_text()]
    assert len(levels) == 2 and abs(found.peak / 2**30 - 23.5) < 1.5, found.peak / 2**30
    assert not levels[0].get_window_extent().overlaps(levels[1].get_window_extent())
