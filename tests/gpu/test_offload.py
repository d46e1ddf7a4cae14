"""Inputs in pinned host memory on a GPU: the same bits, less memory, and nothing waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential
from ckptfused.offload import copies
from ckptfused.offload.copies import CudaCopies
from tests.devices import let_go, repeatable

pytestmark = pytest.mark.gpu

WIDTH, HIDDEN, COUNT = 1024, 2816, 6
TOKENS = (2, 2048)
INPUT = TOKENS[0] * TOKENS[1] * WIDTH * 2  # bytes
SLACK = 65536  # random states, and what PyTorch rounds up


class Model(nn.Module):
    """Blocks behind a projection. Only that is trained: gradients of the blocks' weights would be most of the peak."""

    def __init__(self, offload: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        layers = [
            FusedCheckpointBlock.llama(WIDTH, 8, HIDDEN, num_kv_heads=2, dropout=0.1).requires_grad_(False)
            for _ in range(COUNT)
        ]
        self.layers = FusedCheckpointSequential(*layers, segments=COUNT, offload=offload)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))


def model(offload: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(offload).to("cuda", torch.bfloat16)


def source() -> Tensor:
    return torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)


def steps(one: Model, x: Tensor, count: int = 4) -> list[Tensor]:
    """Outputs and gradients of steps in a row, which take one another's memory."""
    torch.manual_seed(7)
    found = []
    for _ in range(count):
        y = one(x)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), list(one.first.parameters()))]
    return found


def requested(which: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@contextlib.contextmanager
def stream() -> Iterator[None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def pageable() -> AbstractContextManager[object]:
    def buffer(self: CudaCopies, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu")

    return mock.patch.object(CudaCopies, "_buffer", buffer)


def in_pieces() -> AbstractContextManager[object]:
    return mock.patch.object(copies, "LAST_PIECE", 64)


@pytest.mark.parametrize("around", [contextlib.nullcontext, stream, pageable, in_pieces])
def test_bits(around: Callable[[], AbstractContextManager[object]]) -> None:
    repeatable("cuda")
    x = source()
    want = steps(model(False), x)
    with around():
        got = steps(model(), x)
    assert all(map(torch.equal, got, want))


def test_buffers_are_pinned() -> None:
    host = CudaCopies(torch.device("cuda", torch.cuda.current_device()))._buffer(source())
    assert host.is_pinned()


def test_memory() -> None:
    """Between forward and backward all inputs but the last are gone. At the peak, in the last layer's backward, its own
    is there, and the one that comes back."""
    held, peak = {}, {}
    for offload in (False, True):
        one, x = model(offload), source()
        steps(one, x, 2)  # cuBLAS's workspace, the rotary table
        let_go()
        torch.cuda.synchronize()
        before = requested("current")
        torch.cuda.reset_peak_memory_stats()
        y = one(x)
        held[offload] = requested("current") - before
        torch.autograd.grad(y.sum(), list(one.first.parameters()))
        peak[offload] = requested("peak") - before
        del one, x, y
    assert abs(held[False] - held[True] - (COUNT - 1) * INPUT) <= SLACK
    assert peak[False] - peak[True] >= (COUNT - 2) * INPUT - SLACK


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits() -> None:
    one, x = model(), source()
    steps(one, x)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = steps(one, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(t.isfinite().all() for t in found)


def test_in_a_graph_inputs_stay() -> None:
    one, x = model(), source()
    with stream():
        steps(one, x, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), mock.patch.object(CudaCopies, "to_host") as to_host:
        y = one(x)
        torch.autograd.grad(y.square().sum(), list(one.first.parameters()))
    assert not to_host.called
    graph.replay()
    assert y.isfinite().all()
