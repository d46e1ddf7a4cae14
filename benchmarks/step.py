"""Time and peak memory of a training step in every way that there is: PyTorch's, Hugging Face's, this library's.

Each way has a process of its own for its memory, in which its gradients are first compared with float64; one whose
gradients are wrong is not timed. Then all take turns; in full size, of which there is room for one, each is timed in
its process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Column, Rows, Sizes, Steps, mib, number, option, ratio
from benchmarks.checks import worst_error
from benchmarks.memory import memory_of
from benchmarks.runner import summary, take_turns
from benchmarks.step_batches import Batch, Shape
from benchmarks.step_models import CASES, loss_of
from benchmarks.step_ways import CHECKPOINT, EAGER, Loss, ways

CHECKED = 2, 64
"""Layers and tokens of the model whose gradients are compared."""
ALONE_SECONDS = 4.0
"""Time that steps take in a way's own process, in all."""


@dataclass(frozen=True, kw_only=True)
class StepSizes(Sizes):
    """A model of `step_models.py`, its size and its type."""

    case: str = option(*CASES, every=False)
    size: str = option("two-cores", "full", "tiny", every=False)
    dtype: str = option("float32", "bfloat16")
    device: str = option("cpu", "cuda", every=False)


def ways_of(sizes: StepSizes) -> dict[str, Any]:
    """The ways that this case can be trained in."""
    case = CASES[sizes.case]
    return ways(case.whole, case.causal, sizes.device == "cuda" and is_timed_alone(sizes))


def made(sizes: StepSizes, shape: Shape, dtype: torch.dtype) -> tuple[Any, Batch]:
    """The model with the same weights each time, in training, and its batch."""
    torch.manual_seed(sizes.seed)
    with torch.device(sizes.device):
        model = CASES[sizes.case].make(shape, dtype).train()
    batch = CASES[sizes.case].batch(shape, dtype)
    return model, {name: t.detach().to(sizes.device).requires_grad_(t.requires_grad) for name, t in batch.items()}


class Training:
    """A model as one way trains it; called, a step."""

    def __init__(self, sizes: StepSizes, way: str) -> None:
        case = CASES[sizes.case]
        self.model, self.batch = made(sizes, case.shape(sizes.size), getattr(torch, sizes.dtype))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5) if case.whole else None
        self.way: Loss = ways_of(sizes)[way](self.model, self.batch)
        self.wait = torch.cuda.synchronize if sizes.device == "cuda" else lambda: None

    def forget(self) -> None:
        """Frees the gradients."""
        for tensor in (*self.trained, *self.batch.values()):
            tensor.grad = None

    def loss(self) -> Tensor:
        return self.way(self.model, self.batch)

    def __call__(self) -> None:
        self.forget()
        self.loss().backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.wait()


def gradients(model: Any, batch: Batch, loss: Loss) -> dict[str, Tensor]:
    """Every gradient of a step, in float64; parameters by their order, for a way may give them other names."""
    loss(model, batch).backward()
    found = {str(i): p for i, p in enumerate(model.parameters())} | batch
    return {name: p.grad.double() for name, p in found.items() if p.grad is not None}


def error_of(sizes: StepSizes, way: str) -> float:
    """The largest share of the allowed error that a gradient uses, without dropout, as `checks.worst_error`, which
    raises `SystemExit` where it is more than all."""
    case = CASES[sizes.case]
    dtype = getattr(torch, case.compared_in or sizes.dtype)
    layers, tokens = CHECKED
    calm = replace(case.shape(sizes.size), layers=layers, tokens=tokens, batch=1, dropout=0.0)
    plain, batch = made(sizes, calm, dtype)
    truth, wide = case.exact(plain), dict(batch)
    for name, value in batch.items():
        if value.is_floating_point():
            wide[name] = value.detach().double().requires_grad_(value.requires_grad)
    exact, own = gradients(truth, wide, loss_of), gradients(plain, batch, loss_of)
    model, batch = made(sizes, calm, dtype)
    ours = gradients(model, batch, ways_of(sizes)[way](model, batch))
    if ours.keys() != exact.keys():
        raise SystemExit("gradient check failed, no time reported: others have gradients")
    return worst_error(exact, own, ours, dtype)


def alone(sizes: StepSizes, way: str) -> dict[str, Any]:
    """What one way needs: bytes above weights and optimizer state at the peak of a step, and between its passes."""
    try:
        return measured(sizes, way)
    except SystemExit as why:
        return {"refused": str(why)}
    except torch.OutOfMemoryError:
        return {"refused": "out of memory"}


def measured(sizes: StepSizes, way: str) -> dict[str, Any]:
    """The same; raises where the gradients are wrong, or memory does not suffice."""
    error = error_of(sizes, way)
    step = Training(sizes, way)
    for _ in range(2):
        step()  # compiles; the optimizer makes its state
    step.forget()
    saved = memory_of(step.loss, sizes.device).lasting
    found = {"error": error, "saved": saved, "peak": memory_of(step, sizes.device).peak}
    if is_timed_alone(sizes):
        times = take_turns({way: step}, ALONE_SECONDS, BENCHMARK.clock)[way]
        found |= summary(times, times)
    return found


def is_timed_alone(sizes: StepSizes) -> bool:
    """Whether there is no room for the models of all ways side by side."""
    return sizes.size == "full"


def variants(sizes: StepSizes) -> Steps:
    return {way: None if is_timed_alone(sizes) else Training(sizes, way) for way in ways_of(sizes)}


def shape(sizes: StepSizes, rows: Rows) -> str:
    case = CASES[sizes.case]
    s = case.shape(sizes.size)
    classes = f", {s.vocabulary:,} classes" if s.vocabulary else ""
    return (
        f"{case.about}: {s.layers} layers, C {s.width}, {s.heads} heads{classes}, {s.batch} × {s.tokens} tokens, "
        f"dropout {s.dropout}, {sizes.dtype}. Peak: PyTorch's allocator above weights and optimizer state, gradients "
        "included; saved: what forward leaves for backward. Error: the largest of a gradient's against float64, over "
        "twice eager's and half an ulp of its norm."
    )


BENCHMARK = Benchmark(
    name="step",
    doc=__doc__,
    sizes=StepSizes(),
    variants=variants,
    alone=alone,
    columns=(
        mib("peak", "peak"),
        mib("saved", "saved"),
        ratio("time of eager", EAGER),
        ratio("peak of eager", EAGER, "peak"),
        ratio("peak of checkpoint", CHECKPOINT, "peak"),
        number("error", "error", ".2f"),
        Column("", lambda row, rows: row.get("refused", "")),
    ),
    stem=lambda sizes: f"step-{sizes.case}-{sizes.dtype}{'' if sizes.size == 'two-cores' else f'-{sizes.size}'}",
    shape=shape,
    budget=120.0,
)
