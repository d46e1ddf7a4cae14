"""`ckptfused.checkpoint` beside `torch.utils.checkpoint` where the calls themselves cost most: small functions.

float32 on one thread, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from benchmarks.benchmark import PROCESSOR, Benchmark, Sizes, Step, Steps, option
from benchmarks.small_shapes import COLUMNS, OURS, PLAIN

Case = tuple[Callable[..., Tensor], list[Any]]


class MaskedAttention(nn.Module):
    """GPT-2's attention with its triangular mask of 1,024 by 1,024 in a buffer."""

    bias: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(1024, 1024, dtype=torch.bool).tril().view(1, 1, 1024, 1024))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.bias[..., : x.shape[1], : x.shape[1]], -1e4)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Buffers(nn.Module):
    """A linear layer, and buffers of which it reads a row each."""

    def __init__(self, count: int, rows: int, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for i in range(count):
            self.register_buffer(f"table{i}", torch.randn(rows, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(table[0] for table in self.buffers())


def with_x(function: Callable[[], nn.Module]) -> Callable[[], Case]:
    """A module with an input [2, 16, 32]."""
    return lambda: (function(), [torch.randn(2, 16, 32, requires_grad=True)])


def with_buffers(count: int, rows: int) -> Callable[[], Case]:
    """`Buffers` with an input [16, 64]."""
    return lambda: (Buffers(count, rows), [torch.randn(16, 64, requires_grad=True)])


CASES: dict[str, Callable[[], Case]] = {
    "four attentions with GPT-2's mask": with_x(lambda: nn.Sequential(*(MaskedAttention() for _ in range(4)))),
    "20 buffers of 1 MB": with_buffers(20, 4096),
    "20 buffers of 64 KB": with_buffers(20, 256),
    "20 buffers of 8 KB": with_buffers(20, 32),
    "60 buffers of 256 bytes": with_buffers(60, 1),
    "200 tensor arguments": lambda: (
        lambda *tensors: torch.stack(tensors).sin().sum(0),
        [torch.randn(16, requires_grad=True) for _ in range(200)],
    ),
    "a linear layer": with_x(lambda: nn.Linear(32, 32)),
    "an FFN": with_x(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))),
    "a norm, a linear layer and a ReLU": with_x(
        lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(inplace=True))
    ),
    "nn.TransformerEncoderLayer": with_x(lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)),
}
"""A function and its arguments, by what is in it."""


@dataclass(frozen=True, kw_only=True)
class FunctionSizes(Sizes):
    """The function that is checkpointed."""

    function: str = option(*CASES)


def variants(sizes: FunctionSizes) -> Steps:
    """A training step with `torch.utils.checkpoint`, and one with `ckptfused.checkpoint`."""
    function, tensors = CASES[sizes.function]()
    inputs = [*tensors, *(function.parameters() if isinstance(function, nn.Module) else [])]

    def step(checkpoint: Callable[..., Any]) -> Step:
        return lambda: torch.autograd.grad(checkpoint(function, *tensors, use_reentrant=False).sum(), inputs)

    return {PLAIN: step(torch_checkpoint), OURS: step(ckptfused.checkpoint)}


BENCHMARK = Benchmark(
    name="checkpoint-time",
    doc=__doc__,
    sizes=FunctionSizes(),
    variants=variants,
    columns=COLUMNS,
    case=lambda sizes: sizes.function,
    shape=lambda sizes, rows: "float32, processor time, one thread; plain is PyTorch's checkpoint.",
    budget=4.0,
    clock=PROCESSOR,
    threads=1,
)
