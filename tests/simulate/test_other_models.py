"""Profiles and plans of models whose hooks write other models: these are as they were afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def mean_teacher(model: nn.Module, teacher: nn.Module) -> None:
    """The teacher follows by an average that a forward hook makes."""

    def follow(*call: Any) -> None:
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(0.9).add_(s, alpha=0.1)

    model.register_forward_hook(follow)


def in_a_list(model: Any, teacher: nn.Module) -> None:
    """The teacher is in a list, which keeps it out of the model's state."""
    model.others = [teacher]
    model.register_forward_pre_hook(lambda module, args: module.others[0][0].weight.data.add_(1e-3))


def statistic(model: nn.Module, teacher: nn.Module) -> None:
    """A running mean, and a count, that a closure knows by the model's name."""
    teacher.register_buffer("mean", torch.ones(64))
    teacher.register_buffer("count", torch.zeros((), dtype=torch.long))

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        found: Any = teacher
        found.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        found.count += 1

    model.register_forward_hook(note)


def in_a_closure(model: nn.Module, teacher: nn.Module) -> None:
    """A tensor of nobody's."""
    total = torch.zeros(64)
    teacher.register_buffer("total", total)

    def count(*call: Any) -> None:
        total.add_(1)

    model.register_forward_hook(count)


WAYS = (mean_teacher, in_a_list, statistic, in_a_closure)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("what", ["predicted", "measured", "plan", "budget"])
def test_it_is_as_it_was(way: Callable[[nn.Module, nn.Module], None], what: str) -> None:
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    way(model, teacher)
    if what != "measured":
        teacher[0].weight.note = None  # type: ignore[assignment]
        model.register_forward_hook(lambda module, args, y: setattr(teacher[0].weight, "note", y))
    batch = torch.randn(2, 32, 64)
    before = {name: t.clone() for name, t in teacher.state_dict().items()}
    if what == "predicted":
        ckptfused.profile(model, batch, device="cpu")
    elif what == "measured":
        ckptfused.profile(model, batch)
    elif what == "plan":
        ckptfused.plan(model, batch, 10**9)
    else:
        ckptfused.convert(model, budget=10**9, batch=batch)
    assert [name for name, t in teacher.state_dict().items() if not torch.equal(t, before[name])] == []
    assert getattr(teacher[0].weight, "note", None) is None
    model(batch)
    assert [name for name, t in teacher.state_dict().items() if not torch.equal(t, before[name])], "the hook writes"
