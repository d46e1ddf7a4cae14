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


def in_inference_mode(model: nn.Module, teacher: nn.Module) -> None:
    """An average that a decorated hook makes, and a batch norm whose op does not say what it writes."""
    norm = nn.BatchNorm1d(64)
    teacher.add_module("norm", norm)
    teacher.register_buffer("total", torch.zeros(64))

    @torch.inference_mode()
    def follow(module: nn.Module, args: Any, y: Tensor) -> None:
        teacher.total.add_(1)  # type: ignore[operator, union-attr]
        norm(torch.ones(4, 64))

    model.register_forward_hook(follow)


def by_data(model: nn.Module, teacher: nn.Module) -> None:
    """No op tells of it."""

    def follow(*call: Any) -> None:
        for p in teacher.parameters():
            p.data = p.data + 1

    model.register_forward_hook(follow)


def in_a_closure(model: nn.Module, teacher: nn.Module) -> None:
    """A tensor of nobody's."""
    total = torch.zeros(64)
    teacher.register_buffer("total", total)

    def count(*call: Any) -> None:
        total.add_(1)

    model.register_forward_hook(count)


WAYS = (mean_teacher, in_a_list, statistic, in_inference_mode, by_data, in_a_closure)


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


@pytest.mark.parametrize("what", ["predicted", "measured", "doctor"])
def test_gradients_of_others_are_as_they_were(what: str) -> None:
    """A head that trains, too, and is in a list: what it has summed so far counts."""

    class Net(nn.Module):
        def __init__(self, head: nn.Linear) -> None:
            super().__init__()
            self.body, self.heads = net(), [head]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.heads[0](self.body(x))
            return y

    torch.manual_seed(1)
    head, batch = nn.Linear(64, 8), torch.randn(2, 4, 64)
    head.weight.grad = torch.ones(8, 64)
    grad = head.weight.grad
    model = Net(head)
    if what == "doctor":
        ckptfused.doctor(model, batch)
    else:
        ckptfused.profile(model, batch, device="cpu" if what == "predicted" else None)
    assert head.weight.grad is grad
    assert torch.equal(grad, torch.ones(8, 64))
    assert head.bias.grad is None


def test_sparse_tensors_may_be_written() -> None:
    """They have no memory to look at."""
    model, held, seen = net(), torch.zeros(4), torch.zeros(3, 3).to_sparse()

    def note(*call: Any) -> None:
        held.add_(1)
        seen.mul_(2)

    model.register_forward_hook(note)
    ckptfused.profile(model, torch.randn(2, 4, 64), device="cpu")
    assert held.sum() == 0
