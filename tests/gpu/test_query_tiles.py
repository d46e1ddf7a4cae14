"""A block by tiles of queries on a GPU: PyTorch's flash kernel lays the last query on the last key that it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import ckptfused
from ckptfused import cost
from tests.gpu.test_memory import ALLOWED, SLACK, filled, requested

pytestmark = pytest.mark.gpu
LENGTH, WIDTH = 4096, 512
FLASH = "aten::_scaled_dot_product_flash_attention"


def block(dtype: torch.dtype, scratch: int | str | None = None, kv_heads: int = 2) -> ckptfused.FusedCheckpointBlock:
    torch.manual_seed(0)
    made = ckptfused.FusedCheckpointBlock.llama(WIDTH, 8, num_kv_heads=kv_heads, device="cuda", dtype=dtype)
    made.scratch = scratch
    return made


def gradients(made: ckptfused.FusedCheckpointBlock, x: Tensor) -> list[Tensor]:
    x = x.to(next(made.parameters()).dtype).requires_grad_()
    y = made(x)
    dy = torch.linspace(-1, 1, y.numel(), device="cuda", dtype=torch.float64).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *made.parameters()], dy)]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_gradients_are_as_good_as_in_one_piece(kv_heads: int) -> None:
    """At most twice the error of one piece against float64, and a unit of the last place of the sum over tiles."""
    x = torch.randn(2, LENGTH, WIDTH, device="cuda", dtype=torch.float64)
    exact = gradients(block(torch.float64, kv_heads=kv_heads), x)
    whole, tiles = (gradients(block(torch.bfloat16, scratch, kv_heads), x) for scratch in (None, "4MiB"))
    for ours, theirs, truth in zip(tiles, whole, exact, strict=True):
        lost, usual = ((t.double() - truth).norm() for t in (ours, theirs))
        assert lost <= 2 * usual + torch.finfo(torch.bfloat16).eps / 2 * truth.norm()
    again = gradients(block(torch.bfloat16, "4MiB", kv_heads), x)
    assert torch.equal(tiles[0], again[0])


def test_calls_and_memory_are_those_of_the_ledger() -> None:
    made = block(torch.bfloat16, "4MiB")
    x = torch.randn(1, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    spec, call = made.spec(), (1, LENGTH, WIDTH, torch.bfloat16)
    tiles = len([w for w in cost.forward_ledger(spec, *call, device="cuda").work if isinstance(w, cost.AttentionWork)])
    made(x).sum().backward()  # libraries load their workspaces
    with profile() as calls:
        y = made(x)
    assert {event.key: event.count for event in calls.key_averages()}[FLASH] == tiles > 3
    torch.cuda.reset_peak_memory_stats()
    before, dy = requested("current"), torch.ones_like(y)
    held = torch.autograd.grad(y, [x, *made.parameters()], dy)
    needed = requested("peak") - before - dy.nbytes
    counted = cost.backward_ledger(spec, *call, device="cuda", params=filled(spec, torch.bfloat16)).peak
    assert counted <= needed <= ALLOWED * counted + SLACK
    assert len(held) > 1
