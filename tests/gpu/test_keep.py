"""What is kept changes no bit, at sizes where the kernels of real models are chosen: cuBLAS's large tiles, PyTorch's
attention kernels, FFN tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointBlock
from ckptfused.spec import KEEP_PRESETS
from tests.devices import repeatable

pytestmark = pytest.mark.gpu

BLOCKS: dict[str, tuple[dict[str, Any], torch.dtype, tuple[int, int]]] = {
    "dropout everywhere": ({"dropout": 0.1}, torch.bfloat16, (2, 1024)),
    "attention without dropout": ({"residual_dropout": 0.1, "ffn_dropout": 0.1}, torch.bfloat16, (2, 1024)),
    "float16": ({"dropout": 0.1}, torch.float16, (1, 1000)),
    "float32": ({"dropout": 0.1}, torch.float32, (1, 512)),
    "tiles of the FFN": ({"residual_dropout": 0.1, "ffn_dropout": 0.1}, torch.bfloat16, (4, 4096)),
    "q/k norm and a window": ({"dropout": 0.1, "qk_norm": True, "window": 300}, torch.bfloat16, (2, 777)),
}


def make(name: str) -> tuple[FusedCheckpointBlock, Tensor, Tensor]:
    options, dtype, (batch, length) = BLOCKS[name]
    block = FusedCheckpointBlock.llama(1024, 8, dim_feedforward=2816, num_kv_heads=2, **options).to("cuda", dtype)
    x = torch.randn(batch, length, 1024, device="cuda").to(dtype).requires_grad_()
    return block, x, torch.randn_like(x)


def gradients(block: FusedCheckpointBlock, x: Tensor, dy: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], dy)]


@pytest.mark.parametrize("name", BLOCKS)
def test_presets_are_equal(name: str) -> None:
    repeatable("cuda")
    block, x, dy = make(name)
    block.keep = "all"
    expected = gradients(block, x, dy)
    assert all(t.isfinite().all() for t in expected)
    for preset in KEEP_PRESETS:
        block.keep = preset
        different = [
            n for n, (a, b) in enumerate(zip(gradients(block, x, dy), expected, strict=True)) if not a.equal(b)
        ]
        assert not different, (preset, different)


@pytest.mark.parametrize("keep", ["inputs", "attention+mid", "all"])
@pytest.mark.parametrize("name", ["dropout everywhere", "attention without dropout"])
def test_second_backward_is_equal(name: str, keep: str) -> None:
    repeatable("cuda")
    block, x, dy = make(name)
    block.keep = keep
    y = block(x)
    tensors = [x, *block.parameters()]
    first = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    second = torch.autograd.grad(y, tensors, dy)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
