"""Tuning: which shapes, and where what it finds is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.summary import results, summary
from ckptfused.triton import tune, tuning


def test_what_tuning_finds_is_in_a_table_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: measuring takes a GPU."""
    chip = tuning.DeviceKey("chip", (9, 0))

    def measured(n: int, c: int, f: int, act: str, dtype: torch.dtype) -> dict[str, object]:
        if n == 32:
            raise RuntimeError("no memory")
        entry = {
            "choice": "m1",
            "triton": "m1",
            "cublas_ms": 2.0,
            "triton_ms": 1.5,
            "all_ms": {"cublas": {"forward": 0.8, "kept": 1.2}, "m1": {"forward": 0.6, "kept": 0.9}},
        }
        tuning.save(tuning.shape_key(n, c, f, act, dtype, chip), entry)
        return entry

    monkeypatch.setattr(tune, "tune_ffn", measured)
    monkeypatch.setenv("CKPTFUSED_CACHE", str(tmp_path / "mine"))
    options = ["tune", "--tiny", "--device", "cpu", "--out", str(tmp_path / "out"), "--stem", "day_chip"]
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(SystemExit, match="failed: 32 x 64 x 96, swiglu"):
        gpu_tune.main()
    entries = json.loads((tmp_path / "out" / "ffn_tuned.json").read_text())["entries"]
    assert list(entries) == [tuning.shape_key(64, 64, 96, "swiglu", torch.bfloat16, chip)]
    assert not (tmp_path / "mine").exists()
    found = results("day_chip", tmp_path / "out", ["tune"])
    page = summary("a chip", {"tune": Outcome("failed", 3.0, "")}, found)
    assert "| FFN | kernel | forward, ms | kept, ms | chosen |" in page
    assert "| 64 x 64 x 96, swiglu | m1 | 0.600 | 0.900 | yes |" in page
    assert "| 64 x 64 x 96, swiglu | cublas | 0.800 | 1.200 |  |" in page


def test_the_shapes_that_are_tuned() -> None:
    """The shapes are those that the block's benchmark asks the table for."""
    wanted = {(16384, 4096, 14336), (4096, 4096, 14336)}
    assert set(gpu_tune.shapes(gpu_tune.LLAMA_3_8B)) == wanted
