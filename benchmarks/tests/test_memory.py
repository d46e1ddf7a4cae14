"""What the profiler counts of a call's memory."""

from __future__ import annotations

import torch

from benchmarks.memory import live_bytes


def test_what_a_call_leaves_is_its_result_and_what_autograd_saves() -> None:
    x, w = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7)
    # exp's result stays for the backward of both; x @ w alone goes, and w was there before.
    assert live_bytes(lambda: (x @ w).exp().sum()) == 4 * (3 * 7 + 1)
    with torch.no_grad():
        assert live_bytes(lambda: (x @ w).exp().sum()) == 4
        assert live_bytes(lambda: None) == 0
