"""What the profiler counts of a call's memory."""

from __future__ import annotations

import torch

from benchmarks.memory import Memory, memory_of


def test_what_a_call_leaves_is_its_result_and_what_autograd_saves() -> None:
    x, w = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7)
    # exp's result stays for the backward of both; x @ w alone goes, and w was there before.
    assert memory_of(lambda: (x @ w).exp().sum()) == Memory(4 * 2 * 3 * 7, 4 * (3 * 7 + 1), 4 * 3 * 7)
    with torch.no_grad():
        assert memory_of(lambda: (x @ w).exp().sum()).lasting == 4
        assert memory_of(lambda: None) == Memory(0, 0, 0)


def test_peaks() -> None:
    def call() -> torch.Tensor:
        kept = torch.empty(100, dtype=torch.uint8)
        first = torch.empty(30, dtype=torch.uint8)
        del first
        second = torch.empty(20, dtype=torch.uint8)
        del second
        return kept

    assert memory_of(call) == Memory(130, 100, 30)
