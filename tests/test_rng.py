"""Dropout's random numbers: bit for bit those of the slow Philox, independent, and drawn alike whatever is kept.

Every statistical test is of fixed seeds, hence passes always or never; ``ALARM`` is the probability, over the choice of
seeds, that a perfect generator would fail one of its checks. There are fewer than a hundred checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ckptfused import functional, reference, rng
from ckptfused.spec import BlockSpec
from tests.cases import AXES, Case
from tests.oracle import Inputs, make_inputs

ALARM = 1e-9
BIG = (512, 2048)


def state(seed: int, offset: int = 0) -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64)


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    cols=st.integers(1, 70),
    p=st.floats(0, 1),
    seed=INT64,
    offset=INT64,
    site=st.integers(0, 255),
)
def test_masks_equal_the_slow_philox(shape: list[int], cols: int, p: float, seed: int, offset: int, site: int) -> None:
    got = rng.dropout_mask([*shape, cols], p, state(seed, offset), site)
    assert got.dtype == torch.bool
    assert got.equal(reference.dropout_mask([*shape, cols], p, seed, offset, site))


@pytest.mark.parametrize("shape", [(3, 5, 67), (2, 3, 150, 150), (1, 1), (7, 129), (4097, 9), (2, 4, 300, 301)])
@pytest.mark.parametrize("p", [0.0, 1e-5, 0.1, 0.5, 1 - 2**-16, 1.0])
def test_masks_of_odd_shapes(shape: tuple[int, ...], p: float) -> None:
    assert rng.dropout_mask(shape, p, state(-123456789), 2).equal(reference.dropout_mask(shape, p, -123456789, 0, 2))


def test_masks_do_not_depend_on_the_thread_count() -> None:
    threads = torch.get_num_threads()
    masks = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            masks.append(rng.dropout_mask(BIG, 0.3, state(5), 1))
    finally:
        torch.set_num_threads(threads)
    assert masks[0].equal(masks[1])
    assert masks[0].equal(masks[2])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_mean(p: float, seed: int) -> None:
    keep = rng.dropout_mask(BIG, p, state(seed), 0)
    chance = reference.keep_threshold(p) / 65536
    dropped = int((~keep).sum())
    assert stats.binomtest(dropped, keep.numel(), chance).pvalue > ALARM


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_are_dropped_evenly(dim: int) -> None:
    """The drop counts of rows (of columns) scatter as binomial counts do: neither more nor less."""
    p, keep = 0.25, rng.dropout_mask(BIG, 0.25, state(11), 0)
    counts = (~keep).sum(1 - dim).double().numpy()
    n = keep.shape[1 - dim]
    scatter = ((counts - n * p) ** 2 / (n * p * (1 - p))).sum()
    assert ALARM < stats.chi2.cdf(scatter, len(counts)) < 1 - ALARM


def test_all_sixteen_bits_are_uniform() -> None:
    """Masks of rising p are nested, and each step of p drops its share of the elements."""
    masks = torch.stack([rng.dropout_mask(BIG, k / 64, state(3), 1) for k in range(65)])
    assert (masks[1:] <= masks[:-1]).all()
    steps = (masks[:-1] & ~masks[1:]).sum((1, 2)).numpy()
    assert stats.chisquare(steps).pvalue > ALARM
    fine = [rng.dropout_mask(BIG, (1024 + k) / 65536, state(3), 1) for k in range(17)]
    steps = np.array([int((a & ~b).sum()) for a, b in zip(fine, fine[1:], strict=False)])
    assert stats.chisquare(steps).pvalue > ALARM


def _independent(a: Tensor, b: Tensor) -> None:
    table = np.array([[int((x & y).sum()) for y in (b, ~b)] for x in (a, ~a)])
    assert stats.chi2_contingency(table, correction=False).pvalue > ALARM, table


OTHERS: dict[str, Callable[[], Tensor]] = {
    "next offset": lambda: rng.dropout_mask(BIG, 0.3, state(7, 1), 0),
    "offset + 4": lambda: rng.dropout_mask(BIG, 0.3, state(7, 4), 0),
    "high offset": lambda: rng.dropout_mask(BIG, 0.3, state(7, 2**32), 0),
    "next seed": lambda: rng.dropout_mask(BIG, 0.3, state(8), 0),
    "high seed": lambda: rng.dropout_mask(BIG, 0.3, state(7 + 2**32), 0),
    "site 1": lambda: rng.dropout_mask(BIG, 0.3, state(7), 1),
    "site 2": lambda: rng.dropout_mask(BIG, 0.3, state(7), 2),
    "site 3": lambda: rng.dropout_mask(BIG, 0.3, state(7), 3),
    "next row": lambda: rng.dropout_mask(BIG, 0.3, state(7), 0).roll(1, 0),
    "two rows on": lambda: rng.dropout_mask(BIG, 0.3, state(7), 0).roll(2, 0),
    **{f"{k} columns on": lambda k=k: rng.dropout_mask(BIG, 0.3, state(7), 0).roll(k, 1) for k in (*range(1, 9), 16)},
}


@pytest.mark.parametrize("other", OTHERS)
def test_independence(other: str) -> None:
    first, second = rng.dropout_mask(BIG, 0.3, state(7), 0), OTHERS[other]()
    assert not first.equal(second)
    _independent(first, second)


DECODER = Case(norm="rmsnorm", rope="half", heads="4/2", mask="causal", drop="all", batch=2, tokens=33)


def _step(inputs: Inputs, spec: BlockSpec, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    x = inputs.x.detach().requires_grad_()
    y = functional.block(x, inputs.params, spec, **inputs.aux, generator=generator)
    return y.detach(), torch.autograd.grad(y, x, inputs.dy)[0]


def test_state_is_one_draw_of_the_generator() -> None:
    like = torch.empty(3)
    torch.manual_seed(5)
    first, second, after = rng.state(like), rng.state(like), torch.get_rng_state()
    assert first.dtype == torch.int64
    assert first.shape == (2,)
    assert first[1] == 0
    assert first[0] != second[0]
    torch.manual_seed(5)
    assert rng.state(like).equal(first)
    assert rng.state(like).equal(second)
    assert torch.get_rng_state().equal(after)
    assert rng.state(like, torch.Generator().manual_seed(5)).equal(first)
    assert torch.get_rng_state().equal(after)


@pytest.mark.parametrize("case", [DECODER, replace(DECODER, layout="sandwich"), replace(DECODER, layout="parallel")])
def test_the_generator_advances_alike(case: Case) -> None:
    """One draw a call whatever is kept, none in backward, the same with and without gradients."""
    inputs = make_inputs(case, torch.float32)
    torch.manual_seed(9)
    rng.state(inputs.x)
    after = torch.get_rng_state()
    outputs = []
    for preset in AXES["keep"]:
        torch.manual_seed(9)
        outputs.append(_step(inputs, case.spec().with_keep(str(preset))))
        assert torch.get_rng_state().equal(after), preset
    torch.manual_seed(9)
    with torch.no_grad():
        y = functional.block(inputs.x, inputs.params, case.spec(), **inputs.aux)
    assert torch.get_rng_state().equal(after)
    assert y.equal(outputs[0][0])
    for got in outputs[1:]:
        assert all(a.equal(b) for a, b in zip(got, outputs[0], strict=True))


def test_calls_differ_and_a_seed_reproduces_them() -> None:
    inputs = make_inputs(DECODER, torch.float32)
    torch.manual_seed(4)
    first, second = (_step(inputs, DECODER.spec()) for _ in range(2))
    assert not first[0].equal(second[0])
    torch.manual_seed(4)
    again = [_step(inputs, DECODER.spec()) for _ in range(2)]
    assert again[0][0].equal(first[0])
    assert again[1][0].equal(second[0])
    assert again[1][1].equal(second[1])


def test_an_explicit_generator_leaves_the_global_one_alone() -> None:
    inputs, before = make_inputs(DECODER, torch.float32), torch.get_rng_state()
    first, second = (_step(inputs, DECODER.spec(), torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.get_rng_state().equal(before)
    assert first[0].equal(second[0])
    assert first[1].equal(second[1])


def test_no_dropout_draws_nothing() -> None:
    inputs, before = make_inputs(DECODER, torch.float32), torch.get_rng_state()
    _step(inputs, DECODER.spec().without_dropout())
    assert torch.get_rng_state().equal(before)


def _with(spec: BlockSpec, **p: float) -> BlockSpec:
    assert spec.attn is not None
    assert spec.ffn is not None
    attn = replace(spec.attn, **{name: value for name, value in p.items() if hasattr(spec.attn, name)})
    return replace(spec, attn=attn, ffn=replace(spec.ffn, **{n: v for n, v in p.items() if hasattr(spec.ffn, n)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("p", [{"p_res": 1.0}, {"p_attn": 1.0, "p_hidden": 1.0}], ids=["residual", "inner"])
def test_p_of_one_drops_all(p: dict[str, float], dtype: torch.dtype) -> None:
    inputs = make_inputs(replace(DECODER, drop="0"), dtype)
    spec = _with(DECODER.spec().without_dropout(), **p)
    params = {name: t.detach().requires_grad_() for name, t in inputs.params.items()}
    x = inputs.x.detach().requires_grad_()
    y = functional.block(x, params, spec, **inputs.aux)
    assert y.equal(inputs.x)
    y.backward(inputs.dy)
    assert x.grad is not None
    assert x.grad.equal(inputs.dy)
    for name, t in params.items():
        assert t.grad is not None, name
        assert (t.grad == 0).all(), name


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_bad_probability(p: float) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"\[0, 1\]"):
        rng.dropout_mask((2, 3), p, state(1), 0)
