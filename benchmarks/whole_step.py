"""Peak memory and time of whole training steps of a Hugging Face Llama: forward, loss, backward and AdamW.

As it is, under its own gradient checkpointing, that with PyTorch's chunked loss, converted, converted with its loss.
Losses and gradients are checked first; the memory is that of a process which runs one variant alone, counted by
PyTorch's allocator; the time is taken in one process in which the variants take turns. Writes
benchmarks/results/whole-step-<layers>x<width>x<vocabulary>[-<label>].json and .md. Needs transformers and torch 2.13.

    python benchmarks/whole_step.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused
from benchmarks import environment, llama
from benchmarks.checks import worst_error
from benchmarks.commands import command_line, interleaved, page, times, write
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns

PLAIN, CHECKPOINTED = "Hugging Face", "its gradient checkpointing"
CHUNKED = "its gradient checkpointing, torch's chunked loss"
CONVERTED, OURS = "convert(model)", 'convert(model, loss="chunked")'
LEAST = 'convert(model, loss="chunked", scratch="4MiB")'
VARIANTS = (PLAIN, CHECKPOINTED, CHUNKED, CONVERTED, OURS, LEAST)
GOAL = 0.20  # of CHECKPOINTED's peak above weights and gradients


@dataclass(frozen=True)
class Sizes(llama.Sizes):
    """The model and its batch; the vocabulary is large, as real ones are."""

    layers: int = 8
    vocabulary: int = 32768

    @property
    def name(self) -> str:
        return f"whole-step-{self.layers}x{self.width}x{self.vocabulary}"


def make(variant: str, sizes: Sizes, seed: int) -> Any:
    """A Llama with random weights, float32, as `variant` trains it."""
    model: Any = llama.make(sizes, seed)
    if variant in (CHECKPOINTED, CHUNKED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its new name, which older versions do not have
            model.gradient_checkpointing_enable()
    elif variant != PLAIN:
        loss, scratch = (None if variant == CONVERTED else "chunked"), ("4MiB" if variant == LEAST else None)
        report = ckptfused.convert(model, loss=loss, scratch=scratch)
        assert report.fused == sizes.layers and all(head.path == "chunked" for head in report.heads), str(report)
    return model


def loss_of(variant: str, model: Any, ids: Tensor) -> Tensor:
    """The loss of the next token."""
    if variant != CHUNKED:
        return model(input_ids=ids, labels=ids).loss
    # By hand: no model of Hugging Face's calls it.
    x = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    chunked: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
    return chunked(x, model.lm_head.weight, ids[:, 1:].flatten(), options=torch.nn.LinearCrossEntropyOptions())  # type: ignore[attr-defined]


def step_of(variant: str, sizes: Sizes, seed: int) -> tuple[Any, Callable[[], None]]:
    """A model and a training step of it."""
    model = make(variant, sizes, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = batch(sizes, sizes.tokens, seed)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(variant, model, ids).backward()
        optimizer.step()

    return model, step


def batch(sizes: Sizes, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.vocabulary, (sizes.batch, tokens), generator=generator)


def check(sizes: Sizes, seed: int) -> str:
    """Raises unless loss and gradients of every variant are right, as `checks.worst_error`; returns what was shown."""
    ids = batch(sizes, min(sizes.tokens, 64), seed + 1)

    def found(variant: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
        model = make(variant, sizes, seed).to(dtype)
        loss = loss_of(variant, model, ids)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    true_loss, exact = found(PLAIN, torch.float64)
    exact = {name: gradient.double() for name, gradient in exact.items()}
    plain, worst = found(PLAIN)[1], 0.0
    for variant in (CHECKPOINTED, CONVERTED, OURS, LEAST):  # torch's chunked loss is five times farther off
        loss, ours = found(variant)
        # Sums over the tokens in another order: a few roundings apart.
        if not abs(loss.double() - true_loss) <= 4 * torch.finfo(torch.float32).eps * abs(true_loss):
            raise SystemExit(f"loss check failed, no time reported: {variant}: {loss}, expected {true_loss}")
        worst = max(worst, worst_error(exact, plain, ours, torch.float32))
    return f"losses, and {len(exact)} gradients, at most {worst:.2f} of the allowed error against float64"


def peak_of(variant: str, sizes: Sizes, seed: int) -> dict[str, int]:
    """Bytes of a second step, when the optimizer has its state, above what was there before: weights and that state."""
    model, step = step_of(variant, sizes, seed)
    step()
    model.zero_grad(set_to_none=True)
    memory = memory_of(step)
    return {"with_gradients": memory.peak, "above_gradients": memory.transient_peak, "gradients": memory.lasting}


def peaks(sizes: Sizes, seed: int, threads: int) -> dict[str, dict[str, int]]:
    """`peak_of` every variant, each in a process of its own."""
    options = [
        word for k, v in {"seed": seed, "threads": threads, **asdict(sizes)}.items() for word in (f"--{k}", str(v))
    ]
    found = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *options, "--memory-of", variant]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[variant] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(sizes: Sizes, budget: float, seed: int, threads: int) -> dict[str, Any]:
    """Checks, then measures memory, then time."""
    checked = check(sizes, seed)
    memory = peaks(sizes, seed, threads)
    steps = {variant: step_of(variant, sizes, seed)[1] for variant in VARIANTS}
    times = {variant: summary(seconds) for variant, seconds in take_turns(steps, budget).items()}
    return {
        "case": sizes.name,
        "dtype": "float32",
        "shape": asdict(sizes),
        "check": checked,
        "seconds": times,
        "peak_bytes": memory,
        "goal": GOAL,
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    shape, memory = result["shape"], result["peak_bytes"]
    base, seconds = memory[CHECKPOINTED]["above_gradients"], result["seconds"][CHECKPOINTED]["median"]
    lines = [
        f"# {result['case']}, {result['dtype']}",
        "",
        f"Llama of {shape['layers']} layers, C {shape['width']}, F {shape['hidden']}, {shape['heads']} heads, "
        f"vocabulary {shape['vocabulary']:,}, {shape['batch']} × {shape['tokens']} tokens; forward, loss, backward, "
        "AdamW.",
        "",
        "| variant | median s | p20 | p80 | peak above weights and gradients, MiB | with gradients | memory | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, row in result["seconds"].items():
        above, whole = memory[variant]["above_gradients"], memory[variant]["with_gradients"]
        lines.append(
            f"| `{variant}` | {times(row)} | {above / 2**20:,.1f} | {whole / 2**20:,.1f} | {above / base:.2f}× | "
            f"{row['median'] / seconds:.2f}× |"
        )
    said = (
        f"{interleaved(result)} Ratios are to {CHECKPOINTED}; goal: {result['goal']:.2f}× of its memory. "
        f"Peaks: PyTorch's CPU allocator, a process's second step. Checked first: {result['check']}."
    )
    return page(lines, result, said)


def main() -> None:
    parser = command_line(__doc__, 120.0)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = Sizes(**{name: getattr(arguments, name) for name in asdict(Sizes())})
    if arguments.memory_of:
        print(json.dumps(peak_of(arguments.memory_of, sizes, arguments.seed)))
        return
    result = measure(sizes, arguments.budget, arguments.seed, arguments.threads)
    write(result, markdown, arguments, sizes.name)


if __name__ == "__main__":
    main()
