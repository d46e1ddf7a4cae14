"""One element, one decision: the CPU's op, the CUDA op, Triton's and every kernel that drops agree bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckptfused import rng

pytestmark = pytest.mark.gpu

OPS = torch.ops.ckptfused
STATES = [(0, 0), (-123456789, 4), (2**63 - 1, 2**40 + 12), (-(2**63), 2**56 - 4)]
SHAPES = [(1, 1), (3, 5, 67), (2, 3, 150, 150), (7, 129), (4097, 9), (513, 1024), (2, 2731)]
RATES = [0.0, 1e-5, 0.1, 0.5, 1 - 2**-16, 1.0]


def state(seed: int, offset: int, device: str = "cuda") -> Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64).to(device)


@pytest.mark.parametrize("site", range(4))
@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_cuda_masks_are_the_cpus(shape: tuple[int, ...], p: float, site: int) -> None:
    for numbers in STATES:
        expected = rng.dropout_mask(shape, p, state(*numbers, "cpu"), site)
        got = rng.dropout_mask(shape, p, state(*numbers), site)
        assert got.dtype == torch.bool and got.is_cuda
        assert got.cpu().equal(expected), numbers


def test_a_mask_of_more_than_two_to_the_31_elements() -> None:
    """Its last rows, which the CPU makes alone: what a 32-bit index would have wrong."""
    rows, cols = 70_000, 32_768  # 2.3e9
    got = rng.dropout_mask((rows, cols), 0.25, state(7, 4), 2)[-8:].cpu()
    ones = torch.ones(8, cols)
    h = torch.empty_like(ones)
    OPS.activation_fwd(ones, ones, state(7, 4, "cpu"), h, "relu", 0.25, 2, cols, rows - 8, 0, [])
    assert got.equal(h != 0)


@pytest.mark.parametrize("site", range(4))
@pytest.mark.parametrize(
    "shape", [(33, 67), (130, 129), (300, 300), (5, 1)], ids=lambda shape: "x".join(map(str, shape))
)
def test_triton_masks_are_the_cpus(shape: tuple[int, int], site: int) -> None:
    pytest.importorskip("triton")
    from ckptfused.triton.philox import keep_tile_kernel

    rows, cols = shape
    for p in RATES[1:-1]:
        for numbers in STATES:
            got = torch.full(shape, 2, dtype=torch.uint8, device="cuda")
            grid = (-(-rows // 32), -(-cols // 64))
            keep_tile_kernel[grid](
                got, state(*numbers), rows, cols, round(p * 65536), SITE=site, BLOCK_M=32, BLOCK_N=64
            )
            assert got.cpu().bool().equal(rng.dropout_mask(shape, p, state(*numbers, "cpu"), site)), (p, numbers)
            assert int(got.max()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("site", [1, 3])
@pytest.mark.parametrize("cols", [1, 67, 4096])
def test_what_the_residual_kernels_drop(cols: int, site: int, dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(37, cols, dtype=dtype, device="cuda"), torch.zeros(37, cols, dtype=dtype, device="cuda")
    total, df, drawn = torch.empty_like(ones), torch.empty_like(ones), state(11, 4)
    rest = ("none", 1e-5, "none", 1e-5, 1.0, 0.3, site, [])
    OPS.residual_fwd(zeros, ones, drawn, None, None, None, None, total, None, *rest)
    OPS.residual_bwd(ones, None, drawn, None, df, None, None, "none", 1e-5, 1.0, 0.3, site, [])
    expected = rng.dropout_mask((37, cols), 0.3, drawn.cpu(), site)
    assert (total != 0).cpu().equal(expected)
    assert (df != 0).cpu().equal(expected)


@pytest.mark.parametrize("act", ["relu", "reglu"])
@pytest.mark.parametrize("cols", [1, 67, 2752])
def test_what_the_activation_kernels_drop(cols: int, act: str) -> None:
    """Also of a tile of rows and columns of a wider tensor."""
    ones = torch.ones(37, cols, device="cuda")
    h, h_again, dg, du, drawn = *(torch.empty_like(ones) for _ in range(4)), state(11, 4)
    expected = rng.dropout_mask((101, cols + 64), 0.3, drawn.cpu(), 2)[64:, 64:]
    tile = (cols + 64, 64, 64, [])
    OPS.activation_fwd(ones, ones, drawn, h, act, 0.3, 2, *tile)
    gate = dg if act == "reglu" else None
    OPS.activation_bwd(ones, ones, ones, drawn, h_again, gate, du, act, 0.3, 2, *tile)
    for t in (h, h_again, du, *([gate] if gate is not None else [])):
        assert (t != 0).cpu().equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 67, 128, 250])
def test_what_attention_drops(length: int, dtype: torch.dtype) -> None:
    """Equal logits and v the unit matrix: o shows which probabilities were kept, dv (of do the unit matrix) too."""
    batch, heads, p = 2, 3, 0.3
    drawn, dim = state(11, 4), 256
    q = torch.zeros(batch, heads, length, dim, dtype=dtype, device="cuda")
    v = torch.eye(length, dim, dtype=dtype, device="cuda").expand(batch, heads, length, dim).contiguous()
    how = (None, None, None, drawn, "none", "none", 0.1, False, 0, 0.0, p)
    o, lse = OPS.attention_fwd(q, q, v, *how)
    expected = rng.dropout_mask((batch, heads, length, length), p, drawn.cpu(), 0)
    assert (o[..., :length] != 0).cpu().equal(expected)
    _, _, dv = OPS.attention_bwd(v, q, q, v, o, lse, *how)
    assert (dv[..., :length].mT != 0).cpu().equal(expected)
