"""The draws of Triton kernels against those of the C++ ops and of the reference."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import ckptfused.rng
from ckptfused.eager.philox import philox4x32, philox_mask
from ckptfused.triton.philox import keep_tile, keep_tile_kernel, load_state

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
        assert torch.equal(mask, philox_mask(shape, p, SEED, OFFSET, site))


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
        assert torch.equal(mask, philox_mask((70, 331), p, SEED, OFFSET, 0))


@triton.jit
def keep_kernel(
    out, first_calls, rng_state, start, threshold, BLOCK_N: tl.constexpr, ORDER: tl.constexpr, WIDE: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Tiles whose rows begin where they are told to."""
    row, col = tl.arange(0, 16), tl.arange(0, BLOCK_N)
    k0, k1, c2, c3 = load_state(rng_state, 0)
    keep = keep_tile(tl.load(first_calls + row), start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE)
    tl.store(out + row[:, None] * BLOCK_N + col[None, :], keep.to(tl.uint8))


@pytest.mark.parametrize("wide", [False, True])
def test_calls_about_the_end_of_32_bits(wide: bool) -> None:
    """Numbers of 32 bits reach up to 2^32 - 1, and no further."""
    start, end = 16, 1 << 32
    calls = [end - 2 - start // 8 - 8 + i for i in range(10)] + ([end + i for i in range(6)] if wide else [7] * 6)
    out = torch.full((16, 32), 7, dtype=torch.uint8)
    first = torch.tensor(calls)
    if not wide:
        first -= 4  # the last call of a row, start // 8 + 3 after its first, is 2^32 - 1
    keep_kernel[1,](out, first, torch.tensor([SEED, OFFSET]), start, 20000, 32, 0, wide)
    key = [SEED & 0xFFFFFFFF, SEED >> 32 & 0xFFFFFFFF]
    for row, begin in zip(out.tolist(), first.tolist(), strict=True):
        for call in range(4):
            number = begin + start // 8 + call
            counter = [number & 0xFFFFFFFF, number >> 32, OFFSET & 0xFFFFFFFF, OFFSET >> 32 & 0xFFFFFF]
            words = philox4x32(counter, key)
            halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
            assert row[8 * call : 8 * call + 8] == [half >= 20000 for half in halves], (number, wide)


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
