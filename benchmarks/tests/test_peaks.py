"""The measurements of the loss and of scratch: they check first, and write what they found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draw, ffn_scratch, loss_head, whole_step
from benchmarks.whole_step import CHECKPOINTED, CHUNKED, CONVERTED, LEAST, OURS, PLAIN, VARIANTS, Sizes
from ckptfused.spec import BlockSpec, FFNSpec

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has no chunked loss"),
]
SMALL = Sizes(layers=2, width=32, hidden=48, heads=2, vocabulary=4096, batch=2, tokens=64)


def test_loss_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loss_head, "TOKENS", 512)
    monkeypatch.setattr(loss_head, "WIDTH", 16)
    words = "loss_head.py --vocabulary 32768 --dtype float32 --budget 0 --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path)])
    loss_head.main()
    result = json.loads((tmp_path / "loss-head-512x16-32768-float32.json").read_text())
    logits = 4 * 512 * 32768
    assert result["peak_bytes"][loss_head.PLAIN] > 2 * logits
    assert result["peak_bytes"][loss_head.GRADIENTS] < 0.6 * logits
    assert f"| `{loss_head.GRADIENTS}` |" in (tmp_path / "loss-head-512x16-32768-float32.md").read_text()


def test_a_wrong_gradient_of_the_head_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loss_head.VARIANTS[loss_head.GRADIENTS]
    monkeypatch.setitem(loss_head.VARIANTS, loss_head.GRADIENTS, lambda x, weight, target: right(x, 2 * weight, target))
    with pytest.raises(SystemExit, match="gradient check failed, no time reported"):
        loss_head.check(torch.float32, 0)


def test_whole_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def here(sizes: Sizes, seed: int, threads: int) -> dict[str, Any]:
        """In this process: what is counted does not depend on it."""
        return {variant: whole_step.peak_of(variant, sizes, seed) for variant in VARIANTS}

    monkeypatch.setattr(whole_step, "peaks", here)
    options = [word for name in vars(SMALL) for word in (f"--{name}", str(getattr(SMALL, name)))]
    monkeypatch.setattr(
        sys, "argv", ["whole_step.py", *options, "--threads", "1", "--budget", "0", "--out", str(tmp_path)]
    )
    threads = torch.get_num_threads()
    try:
        whole_step.main()
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "whole-step-2x32x4096.json").read_text())
    above = {variant: peak["above_gradients"] for variant, peak in result["peak_bytes"].items()}
    logits = 4 * 2 * 64 * 4096
    assert min(above[variant] for variant in (PLAIN, CHECKPOINTED, CONVERTED)) > 3 * logits
    assert max(above[variant] for variant in (CHUNKED, OURS, LEAST)) < 2 * logits
    assert f"| `{OURS}` |" in (tmp_path / "whole-step-2x32x4096.md").read_text()

    draw.draw_whole(tmp_path / "picture.svg", result)
    picture = (tmp_path / "picture.svg").read_text()
    monkeypatch.setattr(draw, "result", lambda name: result)
    table = draw.whole_table(draw.ROOT / "README.md")
    for variant in draw.WHOLE_ROWS:
        seconds = f"{result['seconds'][variant]['median']:.2f} s"
        assert seconds in picture and f"| {seconds} |" in table


def test_a_wrong_gradient_of_a_model_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = whole_step.loss_of
    wrong = {OURS: 1.1}
    monkeypatch.setattr(whole_step, "loss_of", lambda v, model, ids: right(v, model, ids) * wrong.get(v, 1.0))
    with pytest.raises(SystemExit, match="check failed, no time reported"):
        whole_step.check(SMALL, 0)


def test_ffn_scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"TOKENS": 1024, "WIDTH": 32, "HIDDEN": 1024, "HEADS": 2}.items():
        monkeypatch.setattr(ffn_scratch, name, value)
    attn = replace(ffn_scratch.ATTENTION, heads=2, kv_heads=2, head_dim=16)
    monkeypatch.setattr(ffn_scratch, "SPEC", BlockSpec(attn, FFNSpec("swiglu", 1024, pre="rmsnorm")))
    monkeypatch.setattr(sys, "argv", ["ffn_scratch.py", "--dtype", "float32", "--budget", "0", "--out", str(tmp_path)])
    ffn_scratch.main()
    result = json.loads((tmp_path / "ffn-scratch-1024x32-float32.json").read_text())
    whole, least = (result["peak_bytes"][limit] for limit in ("1024", "4"))
    hidden = 4 * 1024 * 1024
    assert whole - least > 1.5 * hidden  # of three in one piece, tiles of 384 rows leave nine eighths
    assert "| 1024 MiB | one piece |" in (tmp_path / "ffn-scratch-1024x32-float32.md").read_text()
