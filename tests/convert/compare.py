"""One training step of two models, compared: what every test of `convert` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def close(got: dict[str, Tensor], want: dict[str, Tensor], relative: float) -> None:
    """Per tensor: relative error, plus half an ulp of its scale an element."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name].double()
        ulp = torch.finfo(w.dtype).eps * w.abs().max().double().item()
        bound = relative * w.double().norm() + 0.5 * ulp * w.numel() ** 0.5
        assert (g - w.double()).norm() <= bound, name
