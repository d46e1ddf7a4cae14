"""FusedCheckpointSequential: bit-equal to its blocks called one by one, one saved input a segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from tests.devices import on_devices, repeatable

B, T, C, H, HIDDEN = 2, 6, 16, 4, 24


def blocks(count: int = 4, device: str = "cpu", **options: Any) -> list[FusedCheckpointBlock]:
    return [FusedCheckpointBlock.llama(C, H, HIDDEN, **{"dropout": 0.2, **options}).to(device) for _ in range(count)]


def source(device: str, *shape: int) -> Tensor:
    return torch.randn(*(shape or (B, T, C))).to(device).requires_grad_()


def one_by_one(sequential: nn.Sequential, x: Tensor, *args: Any) -> Tensor:
    for block in sequential:
        x = block(x, *args)
    return x


def gradients(function: Any, module: nn.Module, x: Tensor, *args: Any) -> list[Tensor | None]:
    torch.manual_seed(7)
    y = function(x, *args)
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    return [y, torch.rand(3, device=x.device), *torch.autograd.grad(y.square().sum(), wanted)]


def check_equal(sequential: FusedCheckpointSequential, x: Tensor, *args: Any) -> None:
    repeatable(x.device.type)
    expected = gradients(lambda *a: one_by_one(sequential, *a), sequential, x, *args)
    actual = gradients(sequential, sequential, x, *args)
    # The second entry is what the global generator gives next.
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@on_devices
@pytest.mark.parametrize("segments", [1, 2, 3, 4])
@pytest.mark.parametrize("keep", ["inputs", "attention+mid", "all"])
def test_bit_equal_with_dropout(segments: int, keep: str, device: str) -> None:
    sequential = FusedCheckpointSequential(*blocks(device=device, keep=keep), segments=segments)
    check_equal(sequential, source(device))


@on_devices
def test_halves_masks_and_layouts(device: str) -> None:
    options: dict[str, Any] = {"dropout": 0.3, "norm_first": True}
    halves = [
        FusedCheckpointAttention(C, H, **options),
        FusedCheckpointFFN(C, HIDDEN, **options),
        FusedCheckpointBlock(C, H, HIDDEN, 0.1),
    ]
    mask = torch.rand(T, T) < 0.3
    mask[:, 0] = False
    mask = mask.to(device)
    sequential = FusedCheckpointSequential(*halves).to(device)
    x = source(device, T, B, C)
    torch.manual_seed(7)
    expected = halves[2](halves[1](halves[0](x, mask)), mask)
    torch.manual_seed(7)
    assert torch.equal(sequential(x, mask), expected)
    check_equal(sequential, x)


@on_devices
def test_shared_block_and_second_backward(device: str) -> None:
    repeatable(device)
    (block,) = blocks(1, device)
    sequential = FusedCheckpointSequential(block, block, block)
    x = source(device)
    expected = gradients(lambda t: one_by_one(sequential, t), sequential, x)
    # A parameter used three times: the three gradients are summed in another order.
    torch.testing.assert_close(gradients(sequential, sequential, x), expected)
    y = sequential(x).sum()
    wanted = [x, *sequential.parameters()]
    first = torch.autograd.grad(y, wanted, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y, wanted), strict=True))


@on_devices
def test_a_block_that_cannot_be_fused(device: str) -> None:
    sequential = FusedCheckpointSequential(
        *blocks(2, device, dropout=0.0), FusedCheckpointFFN(C, HIDDEN, 0.0, torch.tanh).to(device)
    )
    x = source(device)
    check_equal(sequential, x)
    assert FusedCheckpointSequential()(x) is x


def test_refusals() -> None:
    with pytest.raises(TypeError, match="int is not a Module subclass"):
        FusedCheckpointSequential(3)
    with pytest.raises(ValueError, match="segments: expected an integer of at least 1, got 0"):
        FusedCheckpointSequential(segments=0)
    encoder = FusedCheckpointSequential(*blocks(1), nn.TransformerEncoderLayer(C, H, HIDDEN, batch_first=True))
    with pytest.raises(ValueError, match="generator: leave it out, .*TransformerEncoderLayer does not take them"):
        encoder(source("cpu"), generator=torch.Generator())
    with pytest.raises(ValueError, match=r"segments: expected 1 to 2 .* got 3"):
        FusedCheckpointSequential(*blocks(2), segments=3)
    with pytest.raises(TypeError, match="segments: expected an integer, got '2'"):
        FusedCheckpointSequential(*blocks(2), segments="2")  # type: ignore[arg-type]
