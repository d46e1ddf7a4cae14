"""Dropout's random numbers: bit for bit those of the slow Philox, and independent.

How an entry point draws them is tested in properties/test_random_numbers, that every kernel of a GPU has the same ones
in gpu/test_masks.

Every statistical test is of fixed seeds, hence passes always or never; ``ALARM`` is the probability, over the choice of
seeds, that a perfect generator would fail one of its checks. There are fewer than a hundred checks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ckptfused import eager, rng
from tests.devices import on_devices

ALARM = 1e-9
BIG = (512, 2048)


def state(seed: int, offset: int = 0, device: str = "cpu") -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64).to(device)


INT64 = st.integers(-(2**63), 2**63 - 1)


@on_devices
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    cols=st.integers(1, 70),
    p=st.floats(0, 1),
    seed=INT64,
    offset=INT64,
    site=st.integers(0, 255),
)
def test_masks_equal_the_slow_philox(
    device: str, shape: list[int], cols: int, p: float, seed: int, offset: int, site: int
) -> None:
    got = rng.dropout_mask([*shape, cols], p, state(seed, offset, device), site)
    assert (got.dtype, got.device.type) == (torch.bool, device)
    assert got.cpu().equal(eager.philox_mask([*shape, cols], p, seed, offset, site))


@on_devices
@pytest.mark.parametrize("shape", [(3, 5, 67), (2, 3, 150, 150), (1, 1), (7, 129), (4097, 9), (2, 4, 300, 301)])
@pytest.mark.parametrize("p", [0.0, 1e-5, 0.1, 0.5, 1 - 2**-16, 1.0])
def test_masks_of_odd_shapes(shape: tuple[int, ...], p: float, device: str) -> None:
    got = rng.dropout_mask(shape, p, state(-123456789, device=device), 2)
    assert got.cpu().equal(eager.philox_mask(shape, p, -123456789, 0, 2))


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
    chance = eager.keep_threshold(p) / 65536
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


@on_devices
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_bad_probability(p: float, device: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"\[0, 1\]"):
        rng.dropout_mask((2, 3), p, state(1, device=device), 0)


@pytest.mark.parametrize(
    ("site", "error"), [(256, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)]
)
def test_bad_site(site: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"site: expected an integer.*, got {site}"):
        rng.dropout_mask((2, 3), 0.5, state(1), site)  # type: ignore[arg-type]


def test_sixteen_bits_decide() -> None:
    """p is rounded to a multiple of 2⁻¹⁶, half to even: from 2⁻¹⁷ downwards nothing is dropped."""
    least = 2**-17
    assert rng.dropout_mask(BIG, least, state(1), 1).all() and rng.keep_scale(least) == 1
    dropped = int((~rng.dropout_mask(BIG, 1.01 * least, state(1), 1)).sum())
    assert stats.binomtest(dropped, BIG[0] * BIG[1], 2**-16).pvalue > ALARM and dropped > 0
    assert rng.keep_scale(1.01 * least) == 65536 / 65535


@on_devices
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("site", [256, -1, 1 << 40])
def test_bad_site_below_python(site: int, p: float, device: str) -> None:
    """The eight bits of a site would be those of another one."""
    message, given = f"site: expected 0 to 255, got {site}", state(7, device=device)
    like, h = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    rest = (h, None, None, "none", 0.0, 1.0, p, site, [])
    with pytest.raises(RuntimeError, match=f"dropout_mask: {message}"):
        torch.ops.ckptfused.dropout_mask([4, 4], p, given, site)
    with pytest.raises(RuntimeError, match=f"activation_fwd: {message}"):
        torch.ops.ckptfused.activation_fwd(like, like, given, h, "swiglu", p, site, 4, 0, 0, [])
    with pytest.raises(RuntimeError, match=f"residual_bwd: {message}"):
        torch.ops.ckptfused.residual_bwd(like, None, given, None, *rest)
