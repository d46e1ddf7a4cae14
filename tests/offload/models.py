"""Small models that offload, and steps of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential

B, T, C, HIDDEN = 2, 6, 16, 24
COUNT = 4


class Own(nn.Module):
    """A layer that no adapter knows, and no block computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, HIDDEN), nn.Linear(HIDDEN, C)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = x + self.down(torch.cos(self.up(x)))
        return y if other is None else y + other


class Stack(nn.Module):
    """Layers in a row behind a projection, as embeddings are."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = COUNT) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(C, 4, HIDDEN, dropout=0.2, batch_first=True)


class Sequential(Stack):
    """The same of our own blocks."""

    def __init__(self, segments: int = COUNT, offload: bool = True) -> None:
        super().__init__(Own, 0)
        blocks = [FusedCheckpointBlock.llama(C, 4, HIDDEN, dropout=0.2) for _ in range(COUNT)]
        self.layers.append(FusedCheckpointSequential(*blocks, segments=segments, offload=offload))


def fused(offload: bool = True, keep: str = "inputs") -> nn.Module:
    model = Stack(encoder_layer)
    assert ckptfused.convert(model, keep, offload=offload).fused == COUNT
    return model


def generic(offload: bool = True) -> nn.Module:
    model = Stack(Own)
    assert [layer.path for layer in ckptfused.convert(model, offload=offload).layers] == ["generic"] * COUNT
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"fused": fused, "generic": generic, "Sequential": Sequential}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
late_or_soon = pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])


def source() -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(3))


def grads(model: nn.Module, y: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), list(model.parameters()), **options))


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    torch.manual_seed(7)
    y = model(source() if x is None else x)
    return [y.detach(), *grads(model, y)]


def on_the_cpu(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """A step of a copy of the model without the fake, where everything stays."""
    return step(copy.deepcopy(model), x)


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))
