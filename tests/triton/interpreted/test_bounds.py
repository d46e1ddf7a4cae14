"""Interpreted kernels may touch nothing beside their arguments (`tests/triton/bounds.py`)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.once


@triton.jit
def copy(source, target, rows, columns, MASKED_LOAD: tl.constexpr, MASKED_STORE: tl.constexpr):
    row, column = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    mask = (row < rows) & (column < columns)
    load = mask if MASKED_LOAD else (row < rows) & (column < 16)
    store = mask if MASKED_STORE else (row < 8) & (column < columns)
    value = tl.load(source + row * columns + column, mask=load, other=0.0)
    tl.store(target + row * columns + column, value, mask=store)


def parts() -> list[torch.Tensor]:
    """Neighbours in one buffer: what lies beside one is memory of the process."""
    return list(torch.randn(3, 6, 12).unbind())


def test_a_masked_kernel_runs() -> None:
    source, target, _ = parts()
    copy[(1,)](source, target, 6, 12, True, True)
    assert torch.equal(source, target)


@pytest.mark.parametrize(("load", "store", "said"), [(False, True, "load: 4 of 96"), (True, False, "store: 24 of 96")])
def test_what_is_out_of_bounds_is_not_touched(load: bool, store: bool, said: str) -> None:
    """A row that reads into the next one is the mask's matter, and stays within the argument: the last row's alone."""
    source, target, beside = parts()
    before = beside.clone()
    with pytest.raises(Exception, match=said):
        copy[(1,)](source, target, 6, 12, load, store)
    assert torch.equal(beside, before)
