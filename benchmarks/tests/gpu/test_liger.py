"""Liger's functions are called as PyTorch's are: here with functions of its signatures (0.8.5), without Triton."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import liger, row_ops
from benchmarks.differences import expect_close
from benchmarks.ops import TINY, layer_norm, rms_norm


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] and tables [1, T, D], as Hugging Face rotates."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class _Functional(ModuleType):
    """`liger_kernel.transformers.functional`."""

    liger_swiglu = staticmethod(lambda a, b: F.silu(a) * b)
    liger_rms_norm = staticmethod(
        lambda X, W, eps, offset=0.0, casting_mode="llama", in_place=True: F.rms_norm(X, W.shape, W + offset, eps)
    )
    liger_layer_norm = staticmethod(lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps))
    liger_rope = staticmethod(
        lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: (_turned(q, cos, sin), _turned(k, cos, sin))
    )
    liger_cross_entropy = staticmethod(
        lambda input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean": (
            F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
        )
    )


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "glu", "rope", "cross_entropy"])
def test_it_computes_what_pytorch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = ModuleType("liger_kernel.transformers")
    transformers.functional = _Functional("liger_kernel.transformers.functional")
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    make = row_ops.Make(TINY, "cpu", torch.float32)
    width = make.normal(TINY.width)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rms_norm": (rms_norm, (make.matrix(), width, None)),
        "layer_norm": (layer_norm, (make.matrix(), width, width.clone())),
        "glu": (row_ops.swiglu, make._gate_up()),
        "rope": (row_ops.rotated, ([t.clone() for t in make._heads(0)], *make._tables())),
        "cross_entropy": (row_ops.summed_cross_entropy, (make.normal(7, 200), torch.arange(7))),
    }
    plain, given = calls[name]
    right, found = plain(*copy.deepcopy(given)), liger.instead_of(plain)(*given)
    for a, b in zip(found, right, strict=True) if isinstance(right, list) else [(found, right)]:
        expect_close(name, a, b, 1e-6)
