"""The draws of Triton kernels against those of the C++ ops and of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ckptfused.rng
from ckptfused.eager.philox import dropout_mask
from ckptfused.triton.philox import keep_tile_kernel

SEED, OFFSET = -0x1234567890ABCDEF, (7 << 40) + 5


def triton_mask(
    rows: int, cols: int, p: float, state: Tensor, site: int, block_m: int = 16, block_n: int = 32, order: int = 0
) -> Tensor:
    keep = torch.full((rows, cols), 7, dtype=torch.uint8)
    grid = (-(-rows // block_m), -(-cols // block_n))
    keep_tile_kernel[grid](
        keep, state, rows, cols, round(p * 65536), SITE=site, BLOCK_M=block_m, BLOCK_N=block_n, ORDER=order
    )
    assert (keep <= 1).all()
    return keep.bool()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (17, 63), (64, 64), (70, 111), (130, 130)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1 / 65536])
def test_bits(shape: tuple[int, int], p: float) -> None:
    state = torch.tensor([SEED, OFFSET])
    for site in (0, 3):
        mask = triton_mask(*shape, p, state, site)
        assert torch.equal(mask, ckptfused.rng.dropout_mask(shape, p, state, site))
        assert torch.equal(mask, dropout_mask(shape, p, SEED, OFFSET, site))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 8), (32, 64), (64, 16), (128, 128)])
def test_tiles_do_not_matter(block_m: int, block_n: int) -> None:
    state = torch.tensor([SEED, OFFSET])
    assert torch.equal(triton_mask(70, 111, 0.3, state, 0, block_m, block_n), triton_mask(70, 111, 0.3, state, 0))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("p", [0.1, 1.0, 1 / 65536])
def test_the_order_of_keys_does_not_matter(order: int, p: float) -> None:
    """The columns of a tile as attention reads them: each keeps its own bit."""
    state = torch.tensor([SEED, OFFSET])
    for block_n in (32, 128):
        mask = triton_mask(70, 331, p, state, 0, 16, block_n, order)
        assert torch.equal(mask, dropout_mask((70, 331), p, SEED, OFFSET, 0))


def test_another_state_is_seen() -> None:
    first = triton_mask(16, 64, 0.5, torch.tensor([SEED, OFFSET]), 0)
    for seed, offset, site in (
        (SEED ^ 1, OFFSET, 0),
        (SEED ^ 1 << 40, OFFSET, 0),
        (SEED, OFFSET ^ 1 << 50, 0),
        (SEED, OFFSET, 1),
    ):
        other = triton_mask(16, 64, 0.5, torch.tensor([seed, offset]), site)
        assert 0.3 < (first != other).float().mean() < 0.7
