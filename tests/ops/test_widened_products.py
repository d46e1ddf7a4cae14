"""Half-precision products into float32, as a GPU makes them, on the CPU: which PyTorch refuses them."""

from __future__ import annotations

import pytest
import torch

from ckptfused._extension import _C
from tests.forks import python

TYPES = [torch.bfloat16, torch.float16]
# As a PyTorch that has them on the CPU.
ACCEPTED = """
import torch
from torch import Tensor

calls = []

def addmm(self, a, b, out_dtype, *, beta=1, alpha=1, out):
    calls.append("addmm")
    return out.copy_(self + a.to(out_dtype) @ b.to(out_dtype))

def mm(a, b, out_dtype, *, out):
    calls.append("mm")
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

library = torch.library.Library("aten", "IMPL")
library.impl("addmm.dtype_out", addmm, "CPU")
library.impl("mm.dtype_out", mm, "CPU")
from ckptfused._extension import _C

a = torch.randn(5, 7).bfloat16()
out = torch.zeros(5, 5)
for accumulate in (False, True):
    _C.testing.widened_out(out, a, a.t(), accumulate)
exact = a.double() @ a.double().t()
assert (out - 2 * exact).abs().max() < 1e-5
print(*calls)
"""


@pytest.mark.filterwarnings("ignore:ckptfused. this PyTorch has no products")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_refused_product_is_made_otherwise(dtype: torch.dtype, accumulate: bool) -> None:
    """Through float32, block by block: as exact, into columns of a wider buffer and from transposed operands."""
    with pytest.raises(RuntimeError):  # the refusal that this is about
        torch.addmm(torch.zeros(2, 2), *[torch.zeros(2, 2, dtype=dtype)] * 2, out_dtype=torch.float32)
    a, b = torch.randn(1030, 40).to(dtype), torch.randn(40, 1027).to(dtype)
    for left, right in ((a, b), (b.t(), a.t())):
        wide = torch.randn(left.shape[0], right.shape[1] + 8)
        out, before = wide[:, 4:-4], wide.clone()
        _C.testing.widened_out(out, left, right, accumulate)
        exact = left.double() @ right.double() + (before[:, 4:-4] if accumulate else 0)
        # 41 terms and their sum in float32.
        bound = 42 * 2**-24 * (left.double().abs() @ right.double().abs() + before[:, 4:-4].abs())
        assert ((out - exact).abs() <= bound).all()
        assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, -4:], before[:, -4:])


def test_a_refusal_is_told_once() -> None:
    code = """
        import torch
        from ckptfused._extension import _C
        a, out = torch.ones(3, 3).half(), torch.zeros(3, 3)
        for _ in range(3):
            _C.testing.widened_out(out, a, a, True)
    """
    assert python(code).stderr.count("this PyTorch has no products of Half with a float32 result on cpu") == 1


def test_an_accepted_product_is_pytorchs() -> None:
    """Asked once, with the smallest product."""
    run = python(ACCEPTED)
    assert run.stdout.split() == ["addmm", "mm", "addmm"], run.stderr
