"""Float32 products on the CPU: which library makes them, and that both are right."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ckptfused._extension import _C
from tests.accounting import Events

SHAPES = (
    (128, 128, 128),
    (300, 1001, 77),
    (1024, 2048, 8),
    (9, 512, 600),
    (64, 64, 64),
    (1, 2048, 2048),
    (2048, 2048, 4),
)
"""Rows, depth and columns: the first four are large enough for oneDNN, the others not."""
LARGE = SHAPES[:4]


def dense(rows: int, cols: int, transposed: bool) -> Tensor:
    return torch.randn(cols, rows).t() if transposed else torch.randn(rows, cols)


def column_slice(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols + 3)[:, 1 : cols + 1]


def in_onednn(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> int:
    """How many products of one call were oneDNN's. Its result is compared with a float64 one."""
    want = a.double() @ b.double() + (out.double() if accumulate else 0)
    # A sum of c products in any order: each addition rounds a partial sum, of which none is above the absolute sum.
    allowed = (a.abs().double() @ b.abs().double() + want.abs()) * (a.shape[1] + 1) * 2**-24
    events = Events(lambda: _C.matmul_out(out, a, b, accumulate))
    assert ((out - want).abs() <= allowed).all()
    return events.count("ckptfused::product")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_dense_products_are_onednn_s_where_mkl_is_slow(shape: tuple[int, int, int]) -> None:
    rows, depth, cols = shape
    expected = int(_C.mkl_is_slow() and shape in LARGE)
    for turned_a, turned_b, accumulate in itertools.product((False, True), repeat=3):
        a, b = dense(rows, depth, turned_a), dense(depth, cols, turned_b)
        for out in (torch.randn(rows, cols), column_slice(rows, cols)):
            assert in_onednn(out, a, b, accumulate) == expected


def test_slices_are_not_copied_for_it() -> None:
    rows, depth, cols = LARGE[0]
    assert not in_onednn(torch.empty(rows, cols), column_slice(rows, depth), dense(depth, cols, False))
    assert not in_onednn(torch.empty(rows, cols), dense(rows, depth, False), column_slice(depth, cols))
    assert not in_onednn(torch.empty(cols, rows).t(), dense(rows, depth, False), dense(depth, cols, False))


def test_onednn_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, depth, cols = LARGE[0]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not in_onednn(torch.empty(rows, cols), dense(rows, depth, False), dense(depth, cols, False))


def test_other_types_stay_pytorch_s() -> None:
    a = torch.randn(128, 128, dtype=torch.float64)
    assert not in_onednn(torch.empty_like(a), a, a)


@pytest.mark.parametrize("transposed", [False, True])
def test_bias(transposed: bool) -> None:
    rows, depth, cols = LARGE[0]
    x, w, bias = torch.randn(rows, depth), dense(depth, cols, not transposed), torch.randn(cols)
    out = torch.full((rows, cols), float("nan"))  # what was there before is not read
    _C.linear_out(out, x, w if transposed else w.t(), bias, transposed)
    want = x.double() @ w.double() + bias.double()
    allowed = (x.abs().double() @ w.abs().double() + bias.abs()) * (depth + 1) * 2**-24
    assert ((out - want).abs() <= allowed).all()


def test_same_bits_again() -> None:
    """A product made again by another buffer of the same strides, and by one that lies elsewhere in memory."""
    rows, depth, cols = LARGE[1]
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    outs = [torch.empty(rows, cols) for _ in range(3)]
    for i, out in enumerate(outs):
        moved = torch.empty(a.numel() + i)[i:].view(a.shape).copy_(a)
        _C.matmul_out(out, moved, b, False)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
