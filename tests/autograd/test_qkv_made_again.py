"""Blocks whose q, k and v and the FFN's piece take more than the caller's limit: backward makes the former again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointBlock, cost
from ckptfused.compat.torch_memory import allocations
from ckptfused.spec import BlockSpec

pytestmark = pytest.mark.each_torch

B, T, C = 4, 48, 64
N = B * T


def pre(limit: int, p: float, keep: Any) -> FusedCheckpointBlock:
    """Its hidden values, 180 a token, stay in one piece below a limit that q, k and v, 192, are above."""
    options: dict[str, Any] = {"batch_first": True, "norm_first": True}
    return FusedCheckpointBlock(C, 4, 90, p, scratch=limit, keep=keep, **options)


def llama(limit: int, p: float, keep: Any) -> FusedCheckpointBlock:
    """Turned in place, and grouped: 128 of q, k and v a token, 120 hidden values."""
    return FusedCheckpointBlock.llama(C, 4, 40, 2, p, scratch=limit, keep=keep)


WAYS: dict[Callable[..., FusedCheckpointBlock], int] = {pre: 186, llama: 124}
"""By the block, a limit in values a token between the two."""
ways = pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)


def step(block: FusedCheckpointBlock) -> tuple[list[Tensor], int]:
    """The result and all gradients, and bytes at the peak of backward beside what was there before."""
    torch.manual_seed(0)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, dy = torch.randn(B, T, C, requires_grad=True), torch.randn(B, T, C)
    y = block(x)
    gradients, events = allocations(lambda: torch.autograd.grad(y, [x, *block.parameters()], dy))
    return [y.detach(), *gradients], max(accumulate(events))


def made(spec: BlockSpec) -> int:
    """How often backward makes q, k and v."""
    return [getattr(work, "name", "") for work in cost.backward_work(spec, B, T, C, dtype=torch.float32)].count("qkv")


@ways
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_bits_are_equal_and_the_peak_no_higher(make: Callable[..., FusedCheckpointBlock], p: float) -> None:
    limit = WAYS[make] * N * 4
    whole, again = make(1 << 40, p, "inputs"), make(limit, p, "inputs")
    (want, most), (got, peak) = step(whole), step(again)
    assert all(map(torch.equal, got, want))
    assert peak <= most
    assert (made(whole.spec()), made(again.spec())) == (1, 2)


@ways
@pytest.mark.parametrize("keep", ["all", "attention+mid+qkv", ("gu",)])
def test_what_is_kept_is_not_made(make: Callable[..., FusedCheckpointBlock], keep: Any) -> None:
    block = make(64 * N * 4, 0.0, keep)
    assert made(block.spec()) == made(make(1 << 40, 0.0, keep).spec()) <= 1


def test_the_peak_of_a_frozen_layer_is_lower_by_them() -> None:
    """Where the FFN sets it, a step of LoRA's: C 1024, F 2752, 4 x 512 tokens in bfloat16."""
    size, piece = 4 * 512 * 3 * 1024 * 2, 4 * 512 * 3 * 2752 * 2
    found = []
    for limit in (size + piece, size + piece - 1):  # each fits, and the hidden values go in one piece
        spec = FusedCheckpointBlock.llama(1024, 16, 2752, device="meta", scratch=limit).spec()
        found.append(cost.backward_scratch(spec, 4, 512, 1024, torch.bfloat16, needs=["x"]))
    assert size // 2 < found[0] - found[1] <= size
