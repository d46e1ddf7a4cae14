"""Times `ckptfused.checkpoint` beside `torch.utils.checkpoint` where the calls themselves cost most: small functions.

float32 on one thread, forward and backward. The two variants of a case take turns, one step each; processor time
counts, so that a busy machine falls on both alike. Writes benchmarks/results/checkpoint-time[-<label>].json and .md.

    python benchmarks/checkpoint_time.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from benchmarks import environment
from benchmarks.commands import command_line, page, write
from benchmarks.small_shapes import Step, measure

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
    """A linear layer, and twenty buffers of 1 MB of which it reads a row each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for i in range(20):
            self.register_buffer(f"table{i}", torch.randn(4096, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(table[0] for table in self.buffers())


def cases() -> dict[str, Case]:
    """A function and its arguments, by what is in it."""
    x = torch.randn(2, 16, 32, requires_grad=True)
    many = [torch.randn(16, requires_grad=True) for _ in range(200)]
    mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    norm = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(inplace=True))
    return {
        "four attentions with GPT-2's mask": (nn.Sequential(*(MaskedAttention() for _ in range(4))), [x]),
        "20 buffers of 1 MB": (Buffers(), [torch.randn(16, 64, requires_grad=True)]),
        "200 tensor arguments": (lambda *tensors: torch.stack(tensors).sin().sum(0), many),
        "a linear layer": (nn.Linear(32, 32), [x]),
        "an FFN": (mlp, [x]),
        "a norm, a linear layer and a ReLU": (norm, [x]),
        "nn.TransformerEncoderLayer": (nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), [x]),
    }


def steps(function: Callable[..., Tensor], tensors: list[Any]) -> list[Step]:
    """A training step with `torch.utils.checkpoint`, and one with `ckptfused.checkpoint`."""
    parameters = [*function.parameters()] if isinstance(function, nn.Module) else []
    inputs = [*tensors, *parameters]

    def step(checkpoint: Callable[..., Any]) -> Step:
        return lambda: torch.autograd.grad(checkpoint(function, *tensors, use_reentrant=False).sum(), inputs)

    return [step(torch_checkpoint), step(ckptfused.checkpoint)]


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = ["# Time of a checkpointed call", "", "| function | PyTorch's µs | ours µs | ratio |", "|---|---|---|---|"]
    for name, row in result["cases"].items():
        theirs, ours = (row[which]["median"] for which in ("plain", "ours"))
        lines.append(f"| {name} | {theirs:.0f} | {ours:.0f} | {row['ratio']:.2f} |")
    least = min(row["steps"] for row in result["cases"].values())
    return page(lines, result, f"Medians of processor time, one thread; at least {least} steps each, in turns.")


def main() -> None:
    arguments = command_line(__doc__, budget=4.0).parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    measured = {name: measure(steps(*case), arguments.budget) for name, case in cases().items()}
    write({"cases": measured, "environment": environment.describe()}, markdown, arguments, "checkpoint-time")


if __name__ == "__main__":
    main()
