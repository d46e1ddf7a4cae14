"""Training steps of two models, compared: what every test of `convert` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.kernels import replaced_kernels
from ckptfused.simulate.stand_ins import flash_attention


def flash_alone() -> AbstractContextManager[None]:
    """A context in which attention saves what a flash kernel saves, and computes nothing."""

    def flash(below: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return flash_attention(query, key, value)

    return replaced_kernels({"aten::scaled_dot_product_attention": flash})


def run(model: nn.Module, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad()
    out: Any = model(**batch)
    (out.loss * scale).backward()
    return {"loss": out.loss.detach(), **gradients(model)}


def result(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The same of a model that returns a tensor."""
    model.zero_grad()
    y = model(x)
    y.pow(3).mean().backward()  # not the mean of squares, which a norm in front of it makes constant
    return {"y": y.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that there are, by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: Any, step: Callable[[Any], dict[str, Tensor]], count: int = 3, optimizer: Any = None
) -> list[dict[str, Tensor]]:
    """What `step`, which leaves gradients in the model, finds in each of a few steps, by default of SGD."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(count):
        found.append(step(model))
        optimizer.step()
    return found


def all_close(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]], relative: float) -> None:
    """Step by step, where each step changes the loss.

    A step moves the weights by lr times the error of the gradients: over four steps, measured, that doubles it at most.
    """
    for g, w in zip(got, want, strict=True):
        close(g, w, relative)
    assert len({w["loss"].item() for w in want}) == len(want) > 1


def close(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
    """Per tensor: relative error, plus half an ulp of its scale an element."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name].double()
        ulp = torch.finfo(w.dtype).eps * w.abs().max().double().item()
        bound = relative * w.double().norm() + 0.5 * ulp * w.numel() ** 0.5
        assert (g - w.double()).norm() <= bound, name


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """To the bit."""
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def no_worse(
    draws: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]], dtype: torch.dtype
) -> None:
    """Checks (ours, the unconverted model's, the truth): at most twice its error, plus half an ulp of this type an
    element.

    Root mean squares over the draws: in low precision errors of small tensors vary severalfold from draw to draw.
    """
    squares: dict[str, Tensor] = {}
    for ours, own, truth in draws:
        assert ours.keys() == own.keys() == truth.keys()
        for name, t in truth.items():
            assert ours[name].dtype == own[name].dtype, name
            ulp = torch.finfo(dtype).eps * t.abs().max().double()
            errors = [(x[name].double() - t.double()).square().sum() for x in (ours, own)]
            squares[name] = squares.get(name, 0.0) + torch.stack([*errors, 0.25 * ulp**2 * t.numel()])
    for name, total in squares.items():
        ours_, own_, ulp = total.sqrt().tolist()
        assert ours_ <= 2 * own_ + ulp, (name, ours_, own_, ulp)
