"""A training step of a Hugging Face language model, and what it holds."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.memory import memory_of


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def step(model: Any, ids: Tensor) -> None:
    """One forward and backward; gradients are freed, as zero_grad() does by default."""
    model.zero_grad(set_to_none=True)
    loss(model, ids).backward()


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The gradients of one step, by the names of what is trained."""
    step(model, ids)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def figures(step: Any) -> dict[str, int]:
    """Bytes alive after forward, and at the peak of a step that frees the gradients of the one before."""
    step()
    return {"alive": memory_of(partial(loss, *step.args)).lasting, "peak": memory_of(step).peak}
