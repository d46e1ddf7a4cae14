"""Ops that are run alone: which, how often, and what they leave as it was; what a cache holds; and that a predicted
order of ways of training follows from the work that each does, without a clock."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfused import convert, cost
from ckptfused.profiler.predict import predicted
from ckptfused.profiler.step import TrainingStep
from ckptfused.simulate import cpu_timings, devices
from ckptfused.simulate.alone import Like, OpCall
from ckptfused.simulate.cpu_timings import CALLS, Cache, untimed
from ckptfused.simulate.devices import Device, device_named

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def here() -> cpu_timings.CpuTimings:
    found = device_named("cpu").machine
    assert found is not None
    return found


def test_an_op_runs_once_for_all_of_its_kind() -> None:
    ran: list[tuple[Any, ...]] = []

    def op(a: Tensor, b: Tensor, factor: float, indices: Tensor) -> None:
        assert a is b and a.shape == (2, 3) and a.stride() == (1, 2) and not a.is_meta and int(indices.sum()) == 0
        a.mul_(factor).bernoulli_(0.5)
        ran.append((a, factor))

    def meta(*shape: int, **options: Any) -> Tensor:
        return torch.empty(*shape, device="meta", **options)

    a, indices = meta(3, 2).t(), meta(4, dtype=torch.int64)
    state = torch.get_rng_state()
    found = here().seconds(op, (a, a, 2.5, indices))
    assert found is not None and found > 0 and len(ran) == 1 + CALLS
    again = meta(3, 2).t()
    assert here().seconds(op, (again, again, 3.5, indices)) == found and len(ran) == 1 + CALLS
    assert here().seconds(op, (again, again, 0.0, indices)) is not None and len(ran) == 2 * (1 + CALLS)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_op_runs_alone_with_the_threads_of_its_caller() -> None:
    """oneDNN asks OpenMP, of which a new thread begins with what the environment says."""
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if re.search(r"lib(gomp|omp|iomp5)[-\w.]*\.so", line))
    openmp = ctypes.CDLL(path)
    said: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert OpCall(openmp.omp_get_max_threads, ()).run(lambda run: said.append(run()))
    finally:
        torch.set_num_threads(before)
    assert said == [before + 1]


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, partial(torch.device, "meta"), partial(cost.OpenLedger, "cpu")],
    ids=["no_grad", "inference_mode", "meta", "ledger"],
)
def test_the_machine_is_measured_outside_of_the_callers_modes(
    mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks first: the rates are kept."""
    seen, seconds = [], devices._seconds
    monkeypatch.setattr(devices, "_cpu", devices._cpu.__wrapped__)

    def spied(function: Callable[[], object]) -> float:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(0).device.type))
        return seconds(function)

    monkeypatch.setattr(devices, "_seconds", spied)
    with mode() as opened:
        assert device_named("cpu").machine is not None
        assert not isinstance(opened, cost.OpenLedger) or len(opened) == 0
    assert seen and set(seen) == {(True, False, "cpu")}


def test_no_ledger_sees_an_op_that_runs_alone() -> None:
    """A ledger that is open would have the code of blocks count itself, not run."""
    results, timings = [], here()

    def ran(a: Tensor, b: Tensor) -> None:
        results.append((cpu_timings.product(a, b), torch.get_num_threads()))

    like = Like.matrix(5, 3, torch.float32)
    q, state = Like((2, 4, 16, 8), (512, 8, 32, 1), torch.float32), (True, 5, False, True)
    with cost.OpenLedger("cpu") as opened, torch.autocast("cpu", torch.bfloat16):
        assert timings.seconds(ran, (like, like.t())) is not None
        assert timings.seconds(cpu_timings.block_attention_forward, (q, q, *state)) is not None
        assert len(opened) == 0
    assert all(torch.equal(out, torch.full((5, 5), 3.0)) for out, _ in results)
    assert {threads for _, threads in results} == {torch.get_num_threads()}


def test_an_op_that_refuses_its_arguments_is_rated() -> None:
    def refuses(a: Tensor) -> None:
        raise RuntimeError("a singular matrix")

    device = device_named("cpu")
    assert device.alone(1e-3, refuses, (Like((2, 2), (2, 1), torch.float32),)) == 1e-3
    assert device.alone(1.0, torch.mm, ()) == 1.0  # too long to be run
    assert device.alone(1e-3, torch.mm, (), size=1 << 40) == 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_and_grouped_products_run(dtype: torch.dtype) -> None:
    """None is refused in the form in which they are called."""
    q, k = Like((2, 4, 16, 8), (512, 8, 32, 1), dtype), Like((2, 2, 16, 8), (256, 8, 16, 1), dtype)
    for run in (cpu_timings.attention_forward, cpu_timings.attention_backward):
        assert here().seconds(run, (q, k, True)) is not None
    for run in (cpu_timings.block_attention_forward, cpu_timings.block_attention_backward):
        times = {
            here().seconds(run, (q, k, causal, window, *rest))
            for causal, window in ((True, 4), (False, 0))
            for rest in ((False, True), (True, False))
        }
        assert None not in times
    weights = Like((3, 8, 8), (64, 8, 1), dtype)  # rows of 16 bytes, as it asks for
    assert here().seconds(cpu_timings.grouped_products, (Like.matrix(7, 8, dtype), weights)) is not None


def test_what_a_cache_holds() -> None:
    """The last that were used, as far as there is room."""
    cache = Cache(100)
    assert cache.missed({"a": 40}, {"b": 40}) == 40  # what an op writes is not read from memory
    assert cache.missed({"a": 40, "b": 40}, {}) == 0
    assert cache.missed({"c": 30}, {}) == 30
    assert cache.missed({"b": 40}, {}) == 0 and cache.missed({"a": 40}, {}) == 40
    assert cache.missed({"d": 60, "e": 60}, {}) == 0  # timed with its misses
    assert cache.missed({"a": 40}, {}) == 40


RATE, ATTENTION = 1e12, 1e11
COUNTED = Device("counted", "cpu", 0, {torch.float32: RATE, torch.bfloat16: RATE}, ATTENTION, math.inf, 1, 0.0, 1e9)
"""Where only products and attention take time."""
FINITE = replace(COUNTED, copy=1e11, launch=1e-6)
LAYERS, C, F, HEADS, GROUPS, T = 3, 64, 160, 4, 2, 48


def seconds(way: str, device: Device, dropout: float = 0.0) -> float:
    """Predicted seconds of a step without an optimizer."""
    sizes = {"hidden_size": C, "intermediate_size": F, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=64, use_cache=False, attention_dropout=dropout)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
        ids = torch.empty(2, T, dtype=torch.int64)
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way != "plain":
        convert(model, way)
    return predicted(model, TrainingStep({"input_ids": ids, "labels": ids}, None, device)).seconds


N, D = 2 * T, C // HEADS
QKV, OUT, GU, DOWN = (2 * N * C * width for width in (C + 2 * GROUPS * D, C, 2 * F, F))
SCORES = 0.5 * 4 * 2 * HEADS * T * T * D
"""FLOPs of causal attention in forward."""
REPLAYED = {
    "all": (0, 0),
    "attention+mid+qkv": (GU, 0),
    "attention+mid": (QKV + GU, 0),
    "attention": (QKV + OUT + GU, 0),
    "mid": (QKV + GU, SCORES),
    "inputs": (QKV + OUT + GU, SCORES),
    "plain": (0, 0),
    "checkpointed": (QKV + OUT + GU, SCORES),
}
"""FLOPs of products and of attention that a layer makes again."""


def test_a_way_takes_what_it_makes_again() -> None:
    """By hand, to rounding, where nothing else takes time."""
    least = seconds("all", COUNTED)
    head = 3 * 2 * N * C * 64
    forward = LAYERS * (QKV + OUT + GU + DOWN)
    assert least == pytest.approx((3 * forward + head) / RATE + LAYERS * 3.5 * SCORES / ATTENTION)
    for way, (products, attention) in REPLAYED.items():
        expected = LAYERS * (products / RATE + attention / ATTENTION)
        assert seconds(way, COUNTED) - least == pytest.approx(expected, abs=1e-12), way


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_more_recomputation_is_never_predicted_faster(dropout: float) -> None:
    """Bytes and launches count too: of two ways of blocks, the one that makes all again that the other does and more;
    and a checkpointed step beside a plain one."""
    found = {way: seconds(way, FINITE, dropout) for way in REPLAYED}
    blocks = [way for way in REPLAYED if way not in ("plain", "checkpointed")]
    for a in blocks:
        for b in blocks:
            fewer, more = REPLAYED[a], REPLAYED[b]
            if a != b and fewer[0] <= more[0] and fewer[1] <= more[1]:
                assert found[a] < found[b], (a, b)
    assert found["plain"] < found["checkpointed"]
    assert found["inputs"] < found["checkpointed"]


def test_a_block_alone_takes_what_its_products_do() -> None:
    """`cost.block_seconds` on the CPU at hand is of products that ran."""
    from ckptfused.spec import BlockSpec, FFNSpec

    rated = replace(device_named("cpu"), machine=None, products={torch.float32: 1.0})
    spec = BlockSpec(ffn=FFNSpec("relu", 32))
    call = (spec, 1, 16, 8, torch.float32)
    forward, _ = cost.block_seconds(*call, rated)
    assert forward.products > 1.0 > cost.block_seconds(*call, device_named("cpu"))[0].products


def test_nothing_is_timed_where_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that was timed before keeps its time."""
    timings = device_named("cpu").machine
    assert timings is not None
    known, other = (torch.ones(3, 17), 1.0), (torch.ones(3, 19), 1.0)
    seconds = timings.seconds(torch.mul, known)
    monkeypatch.setattr(cpu_timings, "_taken", lambda function: pytest.fail("an op was timed"))
    with untimed():
        assert timings.seconds(torch.mul, known) == seconds and timings.seconds(torch.mul, other) is None
