"""Times a training step of `nn.TransformerEncoderLayer`s: as they are, under `torch.utils.checkpoint`, class swapped.

The layers have PyTorch's own defaults, dropout 0.1 among them. Gradients are checked first; no figure is reported after
a failed check. The memory of a step is that of a process which runs one variant alone; the time is taken in one process
in which the variants take turns. Writes benchmarks/results/encoder-<layers>x<width>x<tokens>[-<label>].json and .md.

    python benchmarks/encoder_step.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.checks import gradients, refuse_difference, worst_error
from benchmarks.commands import command_line, interleaved, page, times, write
from benchmarks.step_time import step, summary, time_variants
from ckptfused import FusedCheckpointBlock
from ckptfused.cli.models import TorchCheckpoint

PLAIN, CHECKPOINTED, SWAPPED = "nn.TransformerEncoderLayer", "under torch.utils.checkpoint", "FusedCheckpointBlock"
VARIANTS = (PLAIN, CHECKPOINTED, SWAPPED)
CHECKED_TOKENS = 256  # a step of this many tokens is compared with float64


@dataclass(frozen=True)
class Sizes:
    """The layers and the one sequence that they see."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    tokens: int = 4096

    @property
    def name(self) -> str:
        return f"encoder-{self.layers}x{self.width}x{self.tokens}"


def plain_layers(sizes: Sizes, seed: int, **options: Any) -> nn.ModuleList:
    """PyTorch's layers with its own initial weights and defaults."""
    torch.manual_seed(seed)
    return nn.ModuleList(nn.TransformerEncoderLayer(sizes.width, sizes.heads, **options) for _ in range(sizes.layers))


def variant_layers(variant: str, plain: nn.ModuleList, sizes: Sizes, **options: Any) -> nn.ModuleList:
    """The same layers as `variant` trains them: with the same weights, or the same parameters."""
    if variant == PLAIN:
        return plain
    if variant == CHECKPOINTED:
        return nn.ModuleList(map(TorchCheckpoint, plain))
    dtype = next(plain.parameters()).dtype
    swapped = nn.ModuleList(FusedCheckpointBlock(sizes.width, sizes.heads, **options) for _ in plain).to(dtype)
    swapped.load_state_dict(plain.state_dict())
    return swapped


def sequence(sizes: Sizes, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """One sequence [T, 1, C], and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, 1, sizes.width, generator=generator) for _ in range(2))
    return x.bfloat16(), dy.bfloat16()


def check(sizes: Sizes, seed: int) -> list[str]:
    """Raises unless the swapped layers' gradients are right, as `checks.check_gradients`; returns what was shown."""
    x, dy = sequence(sizes, min(sizes.tokens, CHECKED_TOKENS), seed + 1)
    plain = plain_layers(sizes, seed, dropout=0.0).bfloat16()
    truth = plain_layers(sizes, seed, dropout=0.0).double()
    truth.load_state_dict(plain.state_dict())
    exact = gradients(truth, x.double(), dy.double(), seed)
    eager = gradients(plain, x, dy, seed)
    ours = gradients(variant_layers(SWAPPED, plain, sizes, dropout=0.0), x, dy, seed)
    worst = worst_error(exact, eager, ours, torch.bfloat16)
    kept, rebuilt = (
        gradients(variant_layers(SWAPPED, plain, sizes, keep=keep), x, dy, seed) for keep in ("all", "inputs")
    )
    refuse_difference(kept, rebuilt)
    return [
        f"without dropout at most {worst:.2f} of the allowed error against float64",
        "with dropout 0.1 the same bits keeping everything and saving inputs only",
    ]


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the memory of a process is read from Linux's /proc, and {field} is not there")


def step_memory(variant: str, sizes: Sizes, seed: int) -> int:
    """Bytes by which the first step's peak exceeds what this process held before it, gradients included."""
    layers = variant_layers(variant, plain_layers(sizes, seed).bfloat16(), sizes)
    x, dy = sequence(sizes, sizes.tokens, seed)
    step(layers, x[:64].clone().requires_grad_(), dy[:64])  # libraries load, thread pools start
    layers.zero_grad(set_to_none=True)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    step(layers, x.requires_grad_(), dy)
    return memory("VmHWM") - before


def memory_of_each(sizes: Sizes, seed: int, threads: int) -> dict[str, int]:
    """`step_memory` of every variant, each in a process of its own."""
    found = {}
    for variant in VARIANTS:
        options = {"seed": seed, "threads": threads, **asdict(sizes)}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        run = subprocess.run(
            [sys.executable, __file__, *words, "--memory-of", variant], stdout=subprocess.PIPE, text=True, check=True
        )
        found[variant] = int(run.stdout)
    return found


def measure(sizes: Sizes, budget: float, seed: int, threads: int) -> dict[str, Any]:
    """Checks, then measures memory, then time."""
    checks = check(sizes, seed)
    peaks = memory_of_each(sizes, seed, threads)
    plain = plain_layers(sizes, seed).bfloat16()
    stacks = {variant: variant_layers(variant, plain, sizes) for variant in VARIANTS}
    x, dy = sequence(sizes, sizes.tokens, seed)
    times = time_variants(stacks, x.requires_grad_(), dy, budget)
    return {
        "case": sizes.name,
        "dtype": "bfloat16",
        "shape": {**asdict(sizes), "dim_feedforward": 2048, "dropout": 0.1},
        "checks": checks,
        "seconds": {variant: summary(seconds) for variant, seconds in times.items()},
        "peak_bytes": peaks,
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    shape = result["shape"]
    lines = [
        f"# {result['case']}, {result['dtype']}",
        "",
        f"{shape['layers']} × `nn.TransformerEncoderLayer({shape['width']}, {shape['heads']})` with its defaults "
        f"(F {shape['dim_feedforward']}, dropout {shape['dropout']}), one sequence of {shape['tokens']} tokens; "
        "forward and backward.",
        "",
        "| variant | median s | p20 | p80 | peak memory of a step, MB |",
        "|---|---|---|---|---|",
    ]
    for variant, row in result["seconds"].items():
        lines.append(f"| {variant} | {times(row)} | {result['peak_bytes'][variant] / 1e6:,.0f} |")
    said = (
        f"{interleaved(result)} Peak memory: resident memory at its highest in a process's first step, less "
        f"that before the step. Gradients checked first: {'; '.join(result['checks'])}."
    )
    return page(lines, result, said)


def main() -> None:
    parser = command_line(__doc__, 200.0)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = Sizes(arguments.layers, arguments.width, arguments.heads, arguments.tokens)
    if arguments.memory_of:
        print(step_memory(arguments.memory_of, sizes, arguments.seed))
        return
    result = measure(sizes, arguments.budget, arguments.seed, arguments.threads)
    write(result, markdown, arguments, sizes.name)


if __name__ == "__main__":
    main()
