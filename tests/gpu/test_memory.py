"""Peak memory of a step as PyTorch's allocator is asked for it, against what cost.py predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptfused import FusedCheckpointBlock, cost
from ckptfused.spec import KEEP_PRESETS, BlockSpec, param_shapes
from tests.devices import let_go

pytestmark = pytest.mark.gpu

ALLOWED = 1.03
SLACK = 4096  # random states
WIDTH, HIDDEN = 2048, 5632
SIZES = {"in one piece": (1, 4096), "tiles": (4, 4096)}
RATES: dict[str, dict[str, float]] = {
    "no dropout": {},
    "dropout": {"dropout": 0.1},
    "dropout but in attention": {"residual_dropout": 0.1, "ffn_dropout": 0.1},
}


def filled(spec: BlockSpec, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The parameters of a block without biases."""
    return {name: dtype for name in param_shapes(spec, WIDTH) if not name.endswith("_b")}


def requested(which: str) -> int:
    """Bytes that were asked of the allocator: a block that it gives may be up to 1 MiB larger."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep", KEEP_PRESETS)
def test_peak_of_a_step(keep: str, size: str, rates: str) -> None:
    check(keep, size, rates)


def test_peak_of_a_repeatable_step() -> None:
    """Flash's dq is in several copies then."""
    torch.use_deterministic_algorithms(True)
    check("inputs", "in one piece", "no dropout")


def check(keep: str, size: str, rates: str) -> None:
    (batch, length), dtype = SIZES[size], torch.bfloat16
    block = FusedCheckpointBlock.llama(
        WIDTH, 16, dim_feedforward=HIDDEN, num_kv_heads=4, keep=keep, **RATES[rates]
    ).to("cuda", dtype)  # fmt: skip
    x = torch.randn(batch, length, WIDTH, device="cuda", dtype=dtype).requires_grad_()
    dy, tensors = torch.randn_like(x), [x, *block.parameters()]
    for _ in range(2):  # cuBLAS's workspace, the rotary table
        torch.autograd.grad(block(x), tensors, dy)
    torch.cuda.synchronize()

    call = block.prepare(x)
    spec, dims = BlockSpec.parse(call.text), (batch, length, WIDTH, dtype)
    given: dict[str, Any] = {"device": "cuda", "params": filled(spec, dtype)}
    let_go()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    y = block(x)
    forward = requested("peak") - before
    held = requested("current") - before
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, tensors, dy)
    backward = requested("peak") - before
    del grads

    saved = cost.saved_bytes(spec, *dims)  # x was there before; y is new
    assert saved <= held <= saved + SLACK
    forward_predicted = cost.forward_scratch(spec, *dims, **given)
    # What backward frees of the kept values while it runs, it frees of tensors that autograd still holds.
    backward_predicted = held + cost.backward_scratch(spec, *dims, **given)
    assert forward <= ALLOWED * forward_predicted + SLACK, (forward, forward_predicted)
    assert backward <= ALLOWED * backward_predicted + SLACK, (backward, backward_predicted)
    # A test of the test: a prediction of twice what is used would hold anything.
    assert max(forward, backward) >= 0.9 * max(forward_predicted, backward_predicted)
