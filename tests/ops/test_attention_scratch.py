"""What PyTorch's attention allocates within itself on the CPU, as the ledger has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckptfused import _C
from ckptfused.profiler.allocator import CPUAllocator

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [32, 63, 128])
def test_scratch_of_a_forward(dtype: torch.dtype, head_dim: int, threads: int) -> None:
    """Also where the processor has matrix tiles (AMX), for which it packs the keys and values of 64 tokens and more."""
    lengths = [(n, n) for n in (63, 64, 65, 191, 301, 512, 513, 769)]
    for (heads, kv_heads), (queries, keys) in itertools.product(
        ((1, 1), (4, 4), (4, 1)), [*lengths, (63, 256), (64, 256), (256, 63)]
    ):
        q = torch.randn(2, queries, heads, head_dim, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(2, keys, kv_heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            return FLASH(q, k, v, 0.0, q.size(2) == k.size(2), attn_mask=None, scale=None)

        sizes = (change.size for change in CPUAllocator().record(call).changes)
        most = max(itertools.accumulate(sizes))
        results = q.nbytes + 2 * heads * queries * 4  # o and lse
        assert most - results == _C.flash_scratch_bytes(
            str(dtype).removeprefix("torch."), 2 * kv_heads, queries, keys, head_dim, threads, False
        ), (heads, kv_heads, queries, keys)
