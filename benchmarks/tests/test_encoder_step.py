"""The measurement that the README quotes: it checks first, writes what it found, and is drawn from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import draw, drawings, encoder_step
from benchmarks.encoder_step import CHECKPOINTED, PLAIN, SWAPPED, VARIANTS, EncoderSizes

pytestmark = pytest.mark.once
SMALL = EncoderSizes(layers=2, width=64, heads=4, tokens=512)


@pytest.mark.slow
def test_a_small_run_writes_its_result_and_is_drawn(
    measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = "encoder-step --layers 2 --width 64 --heads 4 --tokens 512 --label here"
    stem, result, rows = measured(words)
    assert stem == "encoder-2x64x512-here"
    assert list(rows) == list(VARIANTS)
    # PyTorch's layers keep [H, T, T] probabilities several times, also while one is replayed under a checkpoint.
    probabilities = 2 * SMALL.heads * SMALL.tokens**2
    assert rows[PLAIN]["peak"] - rows[SWAPPED]["peak"] > 4 * probabilities
    assert rows[CHECKPOINTED]["peak"] - rows[SWAPPED]["peak"] > 4 * probabilities
    assert f"| {SWAPPED} |" in (tmp_path / "encoder-2x64x512-here.md").read_text()

    drawings.draw_encoder(tmp_path / "picture.svg", result)
    picture = (tmp_path / "picture.svg").read_text()
    monkeypatch.setattr(draw, "result", lambda name: result)
    table = draw.encoder_table(draw.ROOT / "README.md")
    for variant in VARIANTS:
        seconds = f"{rows[variant]['median']:.2f} s"
        assert seconds in picture and f"| {seconds} |" in table


@pytest.mark.parametrize("wrong", ["weight", "mask"])
def test_a_wrong_gradient_ends_the_run(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = encoder_step.variant_layers

    def faulty(variant: str, plain: Any, sizes: EncoderSizes, **options: Any) -> Any:
        layers: Any = right(variant, plain, sizes, **options)
        if variant == SWAPPED and wrong == "weight":
            layers[0].linear2.weight.data[0] += 1
        if variant == SWAPPED and options.get("keep") == "inputs":
            layers[1].dropout2.p = 0.2
        return layers

    monkeypatch.setattr(encoder_step, "variant_layers", faulty)
    with pytest.raises(SystemExit, match="gradient check failed, no time reported"):
        encoder_step.check(SMALL)


def test_a_document_without_its_marks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    monkeypatch.setitem(draw.TABLES, "encoder-step", ((), lambda page: f"table of {page.name}", (page,)))
    with pytest.raises(SystemExit, match=r"page.md: expected the lines <!-- begin: encoder-step -->"):
        draw.filled("encoder-step", page)
    page.write_text("a\n<!-- begin: encoder-step -->\nold\n<!-- end: encoder-step -->\nb\n")
    found = "a\n<!-- begin: encoder-step -->\ntable of page.md\n<!-- end: encoder-step -->\nb\n"
    assert draw.filled("encoder-step", page)[1] == found
    monkeypatch.setitem(draw.TABLES, "encoder-step", (("not-measured",), str, (page,)))
    assert draw.filled("encoder-step", page)[1] == page.read_text()
