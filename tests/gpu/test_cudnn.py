"""A block's attention through cuDNN's kernels: they are used where CKPTFUSED_ATTENTION asks for them alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ckptfused.triton import attention
from tests.cases import Case
from tests.oracle import expect, fused, make_inputs, rng_state, run

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(
    mask="causal", heads="4/2", head_dim=64, tokens=150, batch=2, width=96, hidden=130, norm="rmsnorm", rope="half",
    drop="res",
)  # fmt: skip
KERNELS = ("_cudnn_fwd", "_cudnn_bwd")


def compare(device: str) -> list[int]:
    """The block against the oracle; how often it called cuDNN forward and backward."""
    inputs, spec = make_inputs(CASE, torch.bfloat16, device=device), CASE.spec()
    spies = {name: mock.Mock(wraps=getattr(attention, name)) for name in KERNELS}
    with mock.patch.multiple(attention, **spies):
        got = run(fused(spec), inputs)
    expect(spec, inputs, rng_state(inputs.x)).check(got)
    return [spies[name].call_count for name in KERNELS]


def test_the_comparison() -> None:
    """On the CPU, where cuDNN has no part in it."""
    assert compare("cpu") == [0, 0]


@pytest.mark.gpu
def test_a_block_against_the_oracle() -> None:
    """Keeping nothing of attention: forward, its replay and backward. In a process of its own: the choice is read on
    import."""
    code = "from tests.gpu.test_cudnn import compare; print('cuDNN calls:', *compare('cuda'))"
    environment = os.environ | {"CKPTFUSED_ATTENTION": "cudnn", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "cuDNN calls: 2 1" in done.stdout
