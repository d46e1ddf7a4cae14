"""Float32 products on the CPU: which library makes them, and that both are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointFFN, cost
from ckptfused._extension import _C
from tests.accounting import Events

LARGE = ((256, 256, 256), (300, 1001, 130), (1024, 2048, 128), (128, 2048, 1000), (1030, 550, 1100))
"""Rows, depth and columns of products that are large enough for oneDNN: the last in twelve blocks."""
SMALL = ((128, 128, 128), (127, 2000, 1200), (2000, 1200, 127), (8, 64, 50_000))
BLOCK = (1024, 256, 1024)


def matrix(rows: int, cols: int, transposed: bool, sliced: bool) -> Tensor:
    if transposed:
        return matrix(cols, rows, False, sliced).t()
    return torch.randn(rows, cols + 3)[:, 1 : cols + 1] if sliced else torch.randn(rows, cols)


def in_onednn(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> int:
    """How many products of one call were oneDNN's. Its result is compared with a float64 one."""
    want = a.double() @ b.double() + (out.double() if accumulate else 0)
    # A sum of c products in any order: each addition rounds a partial sum, of which none is above the absolute sum.
    allowed = (a.abs().double() @ b.abs().double() + want.abs()) * (a.shape[1] + 1) * 2**-24
    events = Events(lambda: _C.matmul_out(out, a, b, accumulate))
    assert ((out - want).abs() <= allowed).all()
    return events.count("ckptfused::product")


@pytest.mark.parametrize("shape", [*LARGE, *SMALL], ids=str)
def test_large_products_are_onednn_s_where_mkl_is_slow(shape: tuple[int, int, int]) -> None:
    rows, depth, cols = shape
    blocks = math.prod(math.ceil(size / most) for size, most in zip(shape, BLOCK, strict=True))
    expected = blocks if _C.mkl_is_slow() and shape in LARGE else 0
    for turned_a, turned_b, sliced in itertools.product((False, True), repeat=3):
        accumulate = turned_a ^ turned_b ^ sliced  # each three of the four in all ways
        a, b = matrix(rows, depth, turned_a, sliced), matrix(depth, cols, turned_b, sliced)
        assert in_onednn(matrix(rows, cols, False, sliced), a, b, accumulate) == expected


@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
@pytest.mark.parametrize("depth", [256, 512, 1024, 2048, 5000, 20_000])
def test_at_most_twice_the_error_of_pytorch_s(depth: int, draw: Callable[..., Tensor]) -> None:
    """The oracle's rule asks this of a gradient, also where oneDNN's own products break it: 3.8 times at 2048."""
    a, b = draw(256, depth), draw(depth, 256)
    true = a.double() @ b.double()
    out = torch.empty(256, 256)
    _C.matmul_out(out, a, b, False)
    assert (out - true).norm() <= 2 * (a @ b - true).norm()


def test_onednn_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, depth, cols = LARGE[0]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    assert not in_onednn(torch.empty(rows, cols), a, b)


def test_other_types_stay_pytorch_s() -> None:
    a = torch.randn(128, 128, dtype=torch.float64)
    assert not in_onednn(torch.empty_like(a), a, a)


@pytest.mark.parametrize("shape", [LARGE[0], LARGE[-1]], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_bias(shape: tuple[int, int, int], transposed: bool) -> None:
    rows, depth, cols = shape
    x, w, bias = torch.randn(rows, depth), matrix(depth, cols, not transposed, False), torch.randn(cols)
    out = torch.full((rows, cols), float("nan"))  # what was there before is not read
    _C.testing.linear_out(out, x, w if transposed else w.t(), bias, transposed)
    want = x.double() @ w.double() + bias.double()
    allowed = (x.abs().double() @ w.abs().double() + bias.abs()) * (depth + 1) * 2**-24
    assert ((out - want).abs() <= allowed).all()


def test_same_bits_of_any_layout() -> None:
    """A product made again has the same bits wherever its operands and its result lie."""
    rows, depth, cols = LARGE[-1]
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    outs = [torch.empty(rows, cols), torch.empty(rows, 2 * cols)[:, cols:]]
    for i, out in enumerate(outs):
        moved = torch.empty(a.numel() + i)[i:].view(a.shape).copy_(a)
        _C.matmul_out(out, moved, b, False)
    assert torch.equal(*outs)


def test_copies_of_blocks_are_in_the_ledger() -> None:
    """The peaks of a forward and a backward of large products, in slices of gate and up, are what `cost` says."""
    tokens, width, hidden = 1100, 1040, 1030
    ffn = FusedCheckpointFFN(width, hidden, 0.0, "swiglu", batch_first=True)
    x = torch.randn(1, tokens, width, requires_grad=True)
    dims = (1, tokens, width, torch.float32)
    forward = Events(lambda: ffn(x))
    dy = torch.ones_like(x)
    backward = Events(lambda: torch.autograd.grad(forward.result, [x, *ffn.parameters()], dy))
    assert forward.peak_bytes() == cost.forward_scratch(ffn.spec(), *dims)
    assert backward.peak_bytes() == cost.backward_scratch(ffn.spec(), *dims)
