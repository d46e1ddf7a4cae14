"""The measurements of the loss and of scratch: they check first, and write what they found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draw, drawings, loss_head, runner, whole_step
from benchmarks.whole_step import CHECKPOINTED, CHUNKED, CONVERTED, LEAST, OURS, PLAIN, WholeSizes

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss"),
]
SMALL = WholeSizes(layers=2, width=32, hidden=48, heads=2, vocabulary=4096, batch=2, tokens=64)


@pytest.mark.slow
def test_loss_head(measured: Any) -> None:
    stem, _, rows = measured("loss-head --tokens 512 --width 16 --vocabulary 32768 --dtype float32")
    assert stem == "loss-head-512x16-32768-float32"
    logits = 4 * 512 * 32768
    assert rows[loss_head.PLAIN]["peak"] > 2 * logits
    assert rows[loss_head.GRADIENTS]["peak"] < 0.6 * logits


def test_a_wrong_gradient_of_the_head_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loss_head.VARIANTS[loss_head.GRADIENTS]
    monkeypatch.setitem(loss_head.VARIANTS, loss_head.GRADIENTS, lambda x, weight, target: right(x, 2 * weight, target))
    with pytest.raises(SystemExit, match="gradient check failed, no time reported"):
        loss_head.check(loss_head.HeadSizes())


def test_whole_step(measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def here(benchmark: Any, sizes: WholeSizes, variant: str, threads: int) -> dict[str, Any]:
        """In this process: what is counted does not depend on it."""
        return benchmark.alone(sizes, variant)

    monkeypatch.setattr(runner, "alone", here)
    options = " ".join(f"--{name} {value}" for name, value in vars(SMALL).items())
    stem, result, rows = measured(f"whole-step {options}")
    assert stem == "whole-step-2x32x4096"
    above = {variant: row["above_gradients"] for variant, row in rows.items()}
    logits = 4 * 2 * 64 * 4096
    assert min(above[variant] for variant in (PLAIN, CHECKPOINTED, CONVERTED)) > 3 * logits
    assert max(above[variant] for variant in (CHUNKED, OURS, LEAST)) < 2 * logits
    assert f"| {OURS} |" in (tmp_path / "whole-step-2x32x4096.md").read_text()

    drawings.draw_whole(tmp_path / "picture.svg", result)
    picture = (tmp_path / "picture.svg").read_text()
    monkeypatch.setattr(draw, "result", lambda name: result)
    table = draw.whole_table(draw.ROOT / "README.md")
    for variant in draw.WHOLE_ROWS:
        seconds = f"{rows[variant]['median']:.2f} s"
        assert seconds in picture and f"| {seconds} |" in table


def test_a_wrong_gradient_of_a_model_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = whole_step.loss_of
    wrong = {OURS: 1.1}
    monkeypatch.setattr(whole_step, "loss_of", lambda v, model, ids: right(v, model, ids) * wrong.get(v, 1.0))
    with pytest.raises(SystemExit, match="check failed, no time reported"):
        whole_step.check(SMALL)


def test_ffn_scratch(measured: Any, tmp_path: Path) -> None:
    stem, _, rows = measured("ffn-scratch --tokens 1024 --width 32 --hidden 1024 --heads 2 --dtype float32")
    assert stem == "ffn-scratch-1024x32-float32"
    whole, least = (rows[limit]["peak"] for limit in ("1024 MiB", "4 MiB"))
    hidden = 4 * 1024 * 1024
    assert whole - least > 1.5 * hidden  # of three in one piece, tiles of 384 rows leave nine eighths
    (line,) = (line for line in (tmp_path / f"{stem}.md").read_text().splitlines() if line.startswith("| 1024 MiB |"))
    assert " | one piece | " in line
