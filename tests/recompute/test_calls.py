"""Tests of what a checkpointed call costs where little is computed: the calls that Python makes for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckptfused import checkpoint


class Tables(nn.Module):
    """A linear layer, and twenty buffers of 256 KiB that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        for i in range(20):
            self.register_buffer(f"table{i}", torch.ones(1024, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(table[0] for table in self.buffers())


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a linear layer": (lambda: nn.Linear(64, 64), 230),
    "an FFN": (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), 420),
    "20 buffers": (Tables, 430),
}
"""A module, and how many calls more than PyTorch's a step may make: it was 311, 566 and 615 more."""


@pytest.mark.parametrize("case", CASES)
def test_calls_beyond_those_of_pytorch(case: str) -> None:
    make, most = CASES[case]
    module, x = make(), torch.randn(2, 64, requires_grad=True)
    assert made(checkpoint, module, x) - made(torch_checkpoint, module, x) <= most


def made(call: Callable[..., Any], module: nn.Module, x: Tensor) -> int:
    """The calls of Python's and C's functions in a step, once what is remembered of the module is."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(3):
        call(module, x, use_reentrant=False).sum().backward()
    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        call(module, x, use_reentrant=False).sum().backward()
    finally:
        sys.setprofile(before)
    return count
