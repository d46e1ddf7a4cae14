"""tune_ffn's measurement without a GPU: Triton's kernels interpreted, cuBLAS's place taken by the CPU's products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptfused.triton import ffn_paths, ffn_tune
from ckptfused.triton.ffn_configs import INTERPRETED
from ckptfused.triton.ffn_paths import FORWARD, KEEPING, PATHS
from ckptfused.triton.tuning import CUBLAS
from tests.triton.clock import Clock

# n, c, f; the tiles. Both kinds of cut leave a shorter last tile.
SHAPES = {
    "whole": (40, 32, 48, [(0, 40, 0, 48)]),
    "columns": (40, 16, 160, [(0, 40, 0, 64), (0, 40, 64, 64), (0, 40, 128, 32)]),
    "rows": (160, 16, 16, [(0, 64, 0, 16), (64, 64, 0, 16), (128, 32, 0, 16)]),
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, list[Any]]:
    n, c, f, tiles = SHAPES[request.param]
    _, rows, _, cols = tiles[0]
    monkeypatch.setattr(ffn_paths, "ffn_tiles", lambda *args: (rows, cols))
    monkeypatch.setattr(ffn_tune, "_FLUSHED", 8)
    return n, c, f, tiles


def costing(monkeypatch: pytest.MonkeyPatch, clock: Clock, name: str, costs: dict[str, float]) -> None:
    """Every tile of a path takes that long. What it does it does once, for the check: the interpreter is slow."""
    real = getattr(ffn_paths, name)

    def counted(run: Callable[[], None], ms: float) -> Callable[[], None]:
        once = [run]

        def go() -> None:
            if once:
                once.pop()()
            clock.now += ms

        return go

    monkeypatch.setattr(
        ffn_tune, name, lambda *args: {path: counted(run, costs[path]) for path, run in real(*args).items()}
    )


@pytest.mark.parametrize(("slow", "act"), [*((path, "swiglu") for path in PATHS), (None, "swiglu"), (None, "relu2")])
def test_measure(slow: str | None, act: str, shape: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    n, c, f, tiles = shape
    costing(monkeypatch, clock, "cublas_tile", dict.fromkeys(PATHS, 2.0))
    costing(monkeypatch, clock, "triton_tile", {path: 2.5 if path == slow else 1.0 for path in PATHS})
    entry = ffn_tune.measure(n, c, f, act, torch.bfloat16, [INTERPRETED], 1, "cpu")
    assert entry["triton"] == INTERPRETED.name, "left out"
    assert entry["choice"] == (CUBLAS if slow else INTERPRETED.name)
    assert entry["no_faster"] == ([slow] if slow else [])
    if act == "swiglu":
        assert entry["ffn_tiles"] == tiles
    assert entry["all_ms"][CUBLAS] == dict.fromkeys(PATHS, 2.0 * len(entry["ffn_tiles"]))


@pytest.mark.parametrize("path", PATHS)
def test_a_tile_that_is_wrong_on_one_path_is_left_out(
    path: str, shape: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """By one rounding in the last of its tiles."""
    n, c, f, tiles = shape
    real = ffn_paths.triton_tile

    def planted(v: ffn_paths.Views, *args: Any) -> dict[str, Callable[[], None]]:
        runs = real(v, *args)

        def run() -> None:
            runs[path]()
            out = v.h if path in (FORWARD, KEEPING) else v.dh
            out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=out.dtype))

        return {**runs, path: run} if v.tile == tiles[-1] else runs

    monkeypatch.setattr(ffn_tune, "triton_tile", planted)
    with pytest.warns(UserWarning, match=r"left out at .*h differs in bits"):
        entry = ffn_tune.measure(n, c, f, "swiglu", torch.bfloat16, [INTERPRETED], 1, "cpu")
    assert entry["choice"] == CUBLAS and entry["triton"] is None
