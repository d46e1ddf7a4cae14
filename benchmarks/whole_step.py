"""Peak memory and time of whole training steps of a Hugging Face Llama: forward, loss, backward and AdamW.

As it is, under its own gradient checkpointing, that with PyTorch's chunked loss, converted, converted with its loss.
The memory is that of a process which runs one variant alone, counted by PyTorch's allocator. Needs transformers and
torch 2.13.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ckptfused
from benchmarks import llama
from benchmarks.benchmark import Benchmark, Goal, Step, Steps, mib, ratio
from benchmarks.checks import worst_error
from benchmarks.memory import memory_of
from benchmarks.step_ways import torch_chunked_loss

PLAIN, CHECKPOINTED = "Hugging Face", "its gradient checkpointing"
CHUNKED = "its gradient checkpointing, torch's chunked loss"
CONVERTED, OURS = "convert(model)", 'convert(model, loss="chunked")'
LEAST = 'convert(model, loss="chunked", scratch="4MiB")'
VARIANTS = (PLAIN, CHECKPOINTED, CHUNKED, CONVERTED, OURS, LEAST)


@dataclass(frozen=True, kw_only=True)
class WholeSizes(llama.LlamaSizes):
    """The model and its batch; the vocabulary is large, as real ones are."""

    layers: int = 8
    vocabulary: int = 32768


def make(variant: str, sizes: WholeSizes) -> Any:
    """A Llama with random weights, float32, as `variant` trains it."""
    model: Any = llama.make(sizes)
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
    return torch_chunked_loss(model, {"input_ids": ids, "labels": ids})


def step_of(variant: str, sizes: WholeSizes) -> tuple[Any, Step]:
    """A model and a training step of it."""
    model = make(variant, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = batch(sizes, sizes.tokens, sizes.seed)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(variant, model, ids).backward()
        optimizer.step()

    return model, step


def batch(sizes: WholeSizes, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.vocabulary, (sizes.batch, tokens), generator=generator)


def check(sizes: WholeSizes, steps: Any = None) -> str:
    """Raises unless loss and gradients of every variant are right, as `checks.worst_error`; returns what was shown."""
    ids = batch(sizes, min(sizes.tokens, 64), sizes.seed + 1)

    def found(variant: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
        model = make(variant, sizes).to(dtype)
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


def peak_of(sizes: WholeSizes, variant: str) -> dict[str, int]:
    """Bytes of a second step, when the optimizer has its state, above what was there before: weights and that state."""
    model, step = step_of(variant, sizes)
    step()
    model.zero_grad(set_to_none=True)
    memory = memory_of(step)
    return {"with_gradients": memory.peak, "above_gradients": memory.transient_peak, "gradients": memory.lasting}


def variants(sizes: WholeSizes) -> Steps:
    return {variant: step_of(variant, sizes)[1] for variant in VARIANTS}


BENCHMARK = Benchmark(
    name="whole-step",
    doc=__doc__,
    sizes=WholeSizes(),
    variants=variants,
    check=check,
    alone=peak_of,
    columns=(
        mib("peak above weights and gradients", "above_gradients"),
        mib("with gradients", "with_gradients"),
        ratio("memory", CHECKPOINTED, "above_gradients"),
        ratio("time", CHECKPOINTED),
    ),
    goals=lambda sizes: (Goal(OURS, CHECKPOINTED, 0.20, "above_gradients", "peak"),),
    stem=lambda sizes: f"whole-step-{sizes.layers}x{sizes.width}x{sizes.vocabulary}",
    shape=lambda sizes, rows: llama.described(
        sizes,
        "forward, loss, backward, AdamW. Peaks: PyTorch's CPU allocator, a process's second step. Ratios are to "
        f"{CHECKPOINTED}",
    ),
    budget=120.0,
)
