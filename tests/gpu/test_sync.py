"""Forward and backward only enqueue work: nothing in them waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointBlock

pytestmark = pytest.mark.gpu

WIDTH = 256


def llama(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=688, num_kv_heads=2, dropout=0.1).to("cuda", dtype)


def padded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    block = FusedCheckpointBlock(WIDTH, 4, 512, batch_first=True).to("cuda", dtype)
    padding = (torch.arange(96) >= torch.tensor([[96], [60]])).to("cuda")
    return lambda x: block(x, src_key_padding_mask=padding)


def packed(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    block = FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=688, dropout=0.1).to("cuda", dtype)
    bounds = torch.tensor([0, 30, 31, 192], dtype=torch.int32).to("cuda")
    return lambda x: block(x.flatten(0, 1)[None], cu_seqlens=bounds)


def without_dropout(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=688).to("cuda", dtype)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [llama, padded, packed, without_dropout], ids=lambda make: make.__name__)
def test_nothing_waits(make: Callable[[torch.dtype], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> None:
    function = make(dtype)
    x = torch.randn(2, 96, WIDTH, device="cuda", dtype=dtype).requires_grad_()
    function(x).sum().backward()  # compiles, and makes what is made once
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        function(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert x.grad is not None and x.grad.isfinite().all()
