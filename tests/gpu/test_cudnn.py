"""A block's attention through cuDNN's kernels, which are PyTorch's own choice on data-centre chips since Hopper."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckptfused import FusedCheckpointBlock
from ckptfused.triton.backend import OVERRIDE
from tests.cases import Case
from tests.oracle import expect, fused, make_inputs, rng_state, run

CASE = Case(
    mask="causal", heads="4/2", head_dim=64, tokens=150, batch=2, width=96, hidden=130, norm="rmsnorm", rope="half",
    drop="res",
)  # fmt: skip
KERNELS = ("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward")


def compare(device: str) -> list[int]:
    """The block against the oracle; how often it called cuDNN forward and backward, on whatever thread."""
    inputs, spec = make_inputs(CASE, torch.bfloat16, device=device), CASE.spec()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = run(fused(spec), inputs)
    expect(spec, inputs, rng_state(inputs.x)).check(got)
    counts = {event.key: event.count for event in profile.key_averages()}
    return [counts.get(name, 0) for name in KERNELS]


def test_the_comparison() -> None:
    """On the CPU, where cuDNN has no part in it."""
    assert compare("cpu") == [0, 0]


@pytest.mark.gpu
def test_a_block_against_the_oracle() -> None:
    """Keeping nothing of attention: forward, its replay and backward."""
    if OVERRIDE or torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("cuDNN is not the choice here")
    assert compare("cuda") == [2, 1]


@pytest.mark.gpu
def test_a_replay_makes_its_forwards_choice() -> None:
    """Whatever scaled_dot_product_attention may use by then."""
    if OVERRIDE or torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("cuDNN is not the choice here")
    block = FusedCheckpointBlock.llama(128, 2).to("cuda", torch.bfloat16)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            y = block(x)
        y.sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert [counts.get(name, 0) for name in KERNELS] == [0, 0]
    assert counts["aten::_scaled_dot_product_flash_attention_backward"] == 1
