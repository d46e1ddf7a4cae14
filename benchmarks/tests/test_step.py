"""A step in every way: each runs, one with wrong gradients is refused, and none trains by another's graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import runner, step, step_ways
from benchmarks.step import CASES, StepSizes, Training, alone, error_of, ways_of

pytestmark = pytest.mark.once
TINY = StepSizes(size="tiny", dtype="float32")
EAGER = [way for way in step_ways.ways(whole=True, causal=True) if not way.startswith("compile")]


@pytest.mark.parametrize("case", CASES)
def test_ways_in_small(case: str) -> None:
    """All but PyTorch's chunked loss are as right as eager; each of ours saves less."""
    if "lora" in case:
        pytest.importorskip("peft")
    if case == "qlora":
        pytest.importorskip("bitsandbytes")
    sizes = StepSizes(case=case, size="tiny", dtype="bfloat16" if case == "qlora" else "float32")
    for way in EAGER:
        if way in ways_of(sizes) and "torch's" not in way:
            assert error_of(sizes, way) <= 1, way
    saved = {way: alone(sizes, way)["saved"] for way in ("eager", "checkpoint", "ckptfused inputs")}
    # Not the same to the byte: checkpoint saves the random state of each layer, ckptfused 16 bytes of it.
    assert saved["ckptfused inputs"] <= saved["checkpoint"] < saved["eager"]


def test_a_wrong_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(model: Any, batch: Any) -> Any:
        model.layers[0].linear1.bias.register_hook(lambda gradient: gradient * 1.001)
        return step_ways.loss_of

    monkeypatch.setattr(step, "ways_of", lambda sizes: {"faulty": faulty, "frozen": frozen})
    failed = "gradient check failed, no time reported: "
    model, _ = step.made(TINY, CASES["encoder"].shape("tiny"), torch.float32)
    place = [name for name, _ in model.named_parameters()].index("layers.0.linear1.bias")
    assert alone(TINY, "faulty")["refused"].startswith(f"{failed}{place}: error ")
    assert alone(TINY, "frozen")["refused"] == f"{failed}others have gradients"


def frozen(model: Any, batch: Any) -> Any:
    """A way that forgets to train a weight."""
    model.layers[0].linear1.bias.requires_grad_(False)
    return step_ways.loss_of


def test_in_full_size_each_way_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model stands beside another one."""
    full = replace(CASES["encoder"], full=CASES["encoder"].shape("tiny"))
    monkeypatch.setitem(CASES, "encoder", full)
    monkeypatch.setattr(step, "ALONE_SECONDS", 0.0)
    sizes = StepSizes(size="full")
    assert set(step.variants(sizes).values()) == {None}
    monkeypatch.setattr(runner, "alone", lambda benchmark, sizes, way, threads: alone(sizes, way))
    options = runner.parser(step.BENCHMARK).parse_args(["--variant", "eager", "--variant", "ckptfused inputs"])
    rows = runner.measure(step.BENCHMARK, sizes, options)["rows"]
    assert all(row["median"] > 0 and row["steps"] == 3 for row in rows.values()) and len(rows) == 2
    assert rows["ckptfused inputs"]["peak"] < rows["eager"]["peak"]


@pytest.mark.slow
def test_compiled_models_have_graphs_of_their_own() -> None:
    """What one budget compiled is not what the next one runs; and in eager a compiled way would be no way at all."""
    steps = [Training(TINY, way) for way in ("compile", "compile, budget 0.1")]
    saved = []
    for one in steps:
        one()
        one.forget()
        saved.append(step.memory_of(one.loss).lasting)
    assert saved[1] < saved[0] < alone(TINY, "eager")["saved"]


def test_products_are_saved_by_selective_checkpointing() -> None:
    sizes = StepSizes(case="llama", size="tiny", dtype="float32")
    saved = {way: alone(sizes, way)["saved"] for way in ("checkpoint", "checkpoint, selective", "eager")}
    assert saved["checkpoint"] < saved["checkpoint, selective"] < saved["eager"]


def test_a_plan_needs_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """So far from the least to the most: a plan of none of the way needs less than that of all of it."""
    found = {f"{share}": partial(step_ways.planned, share=share) for share in (0.0, 1.0)}
    monkeypatch.setattr(step, "ways_of", lambda sizes: found)
    least, most = (alone(TINY, share)["peak"] for share in found)
    assert least < most
