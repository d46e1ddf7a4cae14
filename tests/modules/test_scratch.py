"""`scratch=`: on blocks, halves, converted layers and the loss, one limit that reaches the kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from tests.accounting import Events

LIMIT = "64KiB"


def ffn(scratch: Any) -> nn.Module:
    return FusedCheckpointFFN(32, 512, 0.0, "swiglu", batch_first=True, scratch=scratch)


def block(scratch: Any) -> nn.Module:
    return FusedCheckpointBlock.llama(32, 2, 512, scratch=scratch)


def encoder(scratch: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 512, 0.0, batch_first=True, norm_first=True)
    ckptfused.convert(layer, scratch=scratch)
    return layer


def sequential(scratch: Any) -> nn.Module:
    return FusedCheckpointSequential(block(scratch), block(scratch))


MAKERS = (ffn, block, encoder, sequential)


def backward(module: nn.Module, x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Peak bytes of a backward, and the gradients."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y = (module(x) * weights).sum()  # not the square's: that of a normalised y is a constant
    events = Events(lambda: torch.autograd.grad(y, [x, *module.parameters()]))
    return events.peak_bytes(), list(events.result)


@pytest.mark.parametrize("make", MAKERS)
def test_the_peak_falls_and_the_gradients_stay(make: Any) -> None:
    torch.manual_seed(0)
    whole = make(None)
    torch.manual_seed(0)
    cut = make(LIMIT)
    x = torch.randn(4, 128, 32, requires_grad=True)
    (most, want), (least, got) = backward(whole, x), backward(cut, x)
    hidden = 4 * 512 * 512  # of two or three values as wide as this, tiles leave an eighth
    assert most - least > 1.5 * hidden, (most, least)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * w.abs().max().item())


def test_it_can_be_changed_and_is_shown() -> None:
    module = FusedCheckpointBlock.llama(32, 2, 512)
    assert module.scratch is None and module.spec().scratch == 0 and "scratch" not in repr(module)
    module.scratch = LIMIT
    assert module.scratch == module.spec().scratch == 64 << 10 and "scratch=65536" in repr(module)
    assert copy.deepcopy(module).scratch == 64 << 10
    module.keep = "all"
    assert module.scratch == 64 << 10
    module.scratch = None
    assert module.spec().scratch == 0
    with pytest.raises(ValueError, match='scratch: expected a number of bytes such as 268435456 or "256MiB"'):
        module.scratch = "little"


def test_half_without_an_ffn_has_none() -> None:
    attention = ckptfused.FusedCheckpointAttention(32, 2)
    attention.scratch = LIMIT
    assert attention.spec().scratch == 0


def test_convert_says_it_and_a_second_convert_takes_it_back() -> None:
    layer: Any = nn.TransformerEncoderLayer(32, 2, 512, batch_first=True)
    assert "keep='inputs', scratch=65,536 bytes" in str(ckptfused.convert(layer, scratch=LIMIT))
    assert layer.forward.mode.scratch == 64 << 10
    assert "scratch" not in str(ckptfused.convert(layer))
    assert layer.forward.mode.scratch == 0
