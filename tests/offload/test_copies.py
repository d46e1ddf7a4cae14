"""Tensors in host memory, in buffers that PyTorch's allocator of pinned memory does not round up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ckptfused.offload import copies
from ckptfused.offload.copies import LAST_PIECE, HostTensor, pieces, pinned_bytes

GIB = 1 << 30


@given(st.integers(1, 1 << 40))
@example(8 * GIB)
@example(8 * GIB + 1)
@example(LAST_PIECE)
def test_pieces_are_powers_of_two_but_the_last(count: int) -> None:
    """So the allocator rounds up the last alone, which is small; and there are few."""
    sizes = pieces(count)
    full = [size for size in sizes if size & (size - 1) == 0]
    assert sum(sizes) == count and full == sorted(set(full), reverse=True)
    assert len(full) == len(sizes) or (full == sizes[:-1] and sizes[-1] < LAST_PIECE)
    assert len(sizes) <= 1 + max(0, count.bit_length() - LAST_PIECE.bit_length() + 1)
    assert count <= pinned_bytes(count) < count + LAST_PIECE and pinned_bytes(count) < 2 * count


@pytest.mark.parametrize("last", [16, LAST_PIECE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_go_and_come_back(last: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the tensor lies, in as many pieces as it takes."""
    monkeypatch.setattr(copies, "LAST_PIECE", last)
    for dims in itertools.permutations(range(3)):
        x = torch.randn(3, 7, 5, dtype=dtype).permute(dims)
        made: list[int] = []

        def buffer(part: Tensor, made: list[int] = made) -> Tensor:
            made.append(part.nbytes)
            return torch.full_like(part, math.nan)

        host = HostTensor(x, buffer)
        assert made == pieces(x.nbytes) and (len(made) > 2) == (last == 16)
        host.fill(x)
        back = host.empty_on(x.device).fill_(math.nan)
        host.write(back)
        assert torch.equal(back, x) and back.stride() == x.stride() and back.dtype == dtype
