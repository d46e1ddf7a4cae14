"""`checkpoint` of a function that writes to its argument: on a side stream, in a CUDA graph, on a second GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckptfused import checkpoint
from tests.devices import repeatable

pytestmark = pytest.mark.gpu

SIZE = 1 << 22  # a copy of it takes longer than the host needs for the next launch


def function(x: Tensor, weight: Tensor) -> Tensor:
    return x.mul_(2).sin() * weight


def inputs(device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(SIZE, generator=generator).to(device) for _ in range(3))
    return x, weight.requires_grad_(), dy


def expected(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    y = function(x.clone(), weight)
    return [y.detach(), *torch.autograd.grad(y, weight, dy)]


def step(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    y = checkpoint(function, x, weight)
    return [y.detach(), *torch.autograd.grad(y, weight, dy)]


def test_a_side_stream() -> None:
    """What is lent was made on that stream just before, and is overwritten there just after."""
    repeatable("cuda")
    x, weight, dy = inputs()
    want = expected(x, weight, dy)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(side):
            made = torch.empty_like(x)
            torch.cuda._sleep(1 << 22)
            made.copy_(x)
            found = step(made, weight, dy)
            assert torch.equal(made, x)
            made.zero_()
        side.synchronize()
        assert all(map(torch.equal, found, want))


def test_a_write_on_another_stream_than_the_calls() -> None:
    repeatable("cuda")
    x, weight, dy = inputs()
    side = torch.cuda.Stream()

    def there(x: Tensor, weight: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
        return x.sin() * weight

    want = expected(x, weight, dy)
    for _ in range(10):
        y = checkpoint(there, x, weight)
        found = [y.detach(), *torch.autograd.grad(y, weight, dy)]
        with torch.cuda.stream(side):  # takes memory that is free there
            torch.full((SIZE,), -1.0, device="cuda")
        assert all(map(torch.equal, found, want))


def test_a_graph() -> None:
    repeatable("cuda")
    x, weight, dy = inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, weight, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(x, weight, dy)
    for factor in (1.0, -0.5):
        with torch.no_grad():
            x.mul_(factor)
        want = expected(x, weight, dy)
        graph.replay()
        assert all(map(torch.equal, found, want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu() -> None:
    repeatable("cuda")
    x, weight, dy = inputs("cuda:1")
    want = expected(x, weight, dy)
    assert torch.cuda.current_device() == 0
    found = step(x, weight, dy)
    assert torch.cuda.current_device() == 0
    assert all(map(torch.equal, found, want))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits() -> None:
    x, weight, dy = inputs()
    step(x, weight, dy)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(x, weight, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
