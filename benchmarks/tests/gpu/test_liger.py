"""Liger's kernels compute what is measured beside ours: in Triton's interpreter, if TRITON_INTERPRET=1 asks for it.

Its LayerNorm and its cross entropy are written beyond what the interpreter can run.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import liger, row_ops
from benchmarks.differences import expect_close
from benchmarks.ops import TINY, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore")  # Liger's own, about backends that it does not find


@pytest.fixture(autouse=True)
def _floats_and_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of type float, which the interpreter leaves as they are, and a root that it has no library for."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    norms = pytest.importorskip("liger_kernel.ops.rms_norm")
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(norms, "rsqrt", lambda x: tl.rsqrt(x))


@pytest.mark.parametrize("name", ["rms_norm", "glu", "rope"])
def test_its_kernels_compute_what_is_measured(name: str) -> None:
    make = row_ops.Make(TINY, "cpu", torch.float32)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rms_norm": (rms_norm, (make.matrix(), make.normal(TINY.width))),
        "glu": (row_ops.swiglu, make._gate_up()),
        "rope": (row_ops.rotated, ([t.clone() for t in make._heads(0)], *make._tables())),
    }
    plain, given = calls[name]
    right = plain(*copy.deepcopy(given))
    found = liger.instead_of(plain)(*given)
    for a, b in zip(found, right, strict=True) if isinstance(right, list) else [(found, right)]:
        expect_close(name, a, b, 1e-5)
