"""tune_ffn's measurement without a GPU: Triton's kernels interpreted, cuBLAS's place taken by the CPU's products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckptfused._extension import _C
from ckptfused.triton import register
from ckptfused.triton.ffn import measure
from ckptfused.triton.ffn.configs import INTERPRETED_FFN
from ckptfused.triton.ffn.launch import ffn_up_bwd, ffn_up_fwd
from ckptfused.triton.ffn.measure import FORWARD_PATH, KEEPING, PATHS, Operands, Runs, TimedRun
from ckptfused.triton.tuning import CUBLAS
from tests.triton.clock import Clock

SHAPE = (40, 32, 48)


@pytest.fixture(scope="module", autouse=True)
def kernels_on_the_cpu() -> Iterator[list[str]]:
    """The names of those that are called."""
    calls: list[str] = []
    _C.forget_ffn_choices()
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("ffn_choice", register._ffn_choice, "CPU")
    for name, kernel in (("ffn_up_fwd", ffn_up_fwd), ("ffn_up_bwd", ffn_up_bwd)):

        def count(*args: object, name: str = name, kernel: object = kernel) -> None:
            calls.append(name)
            kernel(*args)  # type: ignore[operator]

        library.impl(name, count, "CPU")
    yield calls
    library._destroy()
    _C.forget_ffn_choices()


@pytest.fixture(autouse=True)
def nothing_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_FLUSHED", 8)


def costing(monkeypatch: pytest.MonkeyPatch, clock: Clock, slow: str | None) -> None:
    """Every path takes that long. What it does it does once, for the check: the interpreter is slow."""
    real = measure.block_runs

    def counted(run: TimedRun, ms: float) -> TimedRun:
        made: list[list[Tensor]] = []

        def go() -> list[Tensor]:
            if not made:
                made.append(run())
            clock.now += ms
            return made[0]

        return go

    def runs(o: Operands, way: str) -> Runs:
        ms = {path: 2.0 if way == CUBLAS else 2.5 if path == slow else 1.0 for path in PATHS}
        return {path: counted(run, ms[path]) for path, run in real(o, way).items()}

    monkeypatch.setattr(measure, "block_runs", runs)


@pytest.mark.parametrize(("slow", "act"), [*((path, "swiglu") for path in PATHS), (None, "swiglu"), (None, "relu2")])
def test_measure(
    slow: str | None, act: str, monkeypatch: pytest.MonkeyPatch, clock: Clock, kernels_on_the_cpu: list[str]
) -> None:
    kernels_on_the_cpu.clear()
    costing(monkeypatch, clock, slow)
    entry = measure.measure(*SHAPE, act, torch.bfloat16, [INTERPRETED_FFN], 1, "cpu")
    assert kernels_on_the_cpu == ["ffn_up_fwd"] * 2 + ["ffn_up_bwd", "ffn_up_fwd", "ffn_up_bwd"]  # first of all gu
    assert entry["triton"] == INTERPRETED_FFN.name, "left out"
    assert entry["choice"] == (CUBLAS if slow else INTERPRETED_FFN.name)
    assert entry["no_faster"] == ([slow] if slow else [])
    assert entry["ffn_tiles"] == [(0, 40, 0, 48)]
    assert entry["all_ms"][CUBLAS] == dict.fromkeys(PATHS, 2.0)


@pytest.mark.parametrize("path", PATHS)
def test_a_tile_that_is_wrong_on_one_path_is_left_out(path: str, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """By one rounding of its last result."""
    real = measure.block_runs

    def planted(o: Operands, way: str) -> Runs:
        runs = real(o, way)

        def run() -> list[Tensor]:
            made = runs[path]()
            out = made[0][0] if path in (FORWARD_PATH, KEEPING) else made[-1]
            out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=out.dtype))
            return made

        return runs if way == CUBLAS else {**runs, path: run}

    monkeypatch.setattr(measure, "block_runs", planted)
    with pytest.warns(UserWarning, match=r"left out at .*(y|d down_w) differs in bits"):
        entry = measure.measure(*SHAPE, "swiglu", torch.bfloat16, [INTERPRETED_FFN], 1, "cpu")
    assert entry["choice"] == CUBLAS and entry["triton"] is None
