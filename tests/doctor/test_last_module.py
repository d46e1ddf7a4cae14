"""Faults in the last module of a checkpoint, within which the replay stops: it has what backward needs, and no results
of the module are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptfused.doctor import doctor
from tests.doctor.models import WIDTH, Average, batch

pytestmark = pytest.mark.once


class Functional(nn.Module):
    """What it draws it draws after its last module."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.map(x), 0.5)


class Noisy(nn.Module):
    """What it draws between its modules it uses after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.map = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chance = (self.gate(x) + torch.randn(WIDTH)).softmax(-1)
        return self.map(x) * chance


def ends_with(piece: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), piece)


@pytest.mark.parametrize(
    ("make", "place", "words"),
    [
        (lambda: ends_with(nn.Dropout(0.5)), "0.1, 1.1, 2.1", "Dropout drew its random numbers anew in its replay"),
        (Functional, "0, 1, 2", "Functional drew its random numbers anew in its replay"),
        (Noisy, "0, 1, 2", "Noisy drew its random numbers anew in its replay"),
        (lambda: ends_with(Average()), "0.1, 1.1, 2.1", "its buffer 'mean' was updated between its forward and its"),
    ],
    ids=["dropout", "functional", "between", "buffer"],
)
def test_it_is_named(make: Callable[[], nn.Module], place: str, words: str) -> None:
    model = nn.Sequential(*(checkpoint_wrapper(make(), preserve_rng_state=False) for _ in range(3)))
    found = [f for f in doctor(model, batch()).of("error") if "the gradients are off by" in f.text]
    assert [f.place for f in found] == [place] and words in found[0].text
    assert "_checkpoint_wrapped_module" not in found[0].text


class CastsAfter(nn.Module):
    """It casts in its own code, after its last module, in forward alone."""

    type = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (9 * self.down(self.up(x))).to(CastsAfter.type).float().sin()


class Casting(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        CastsAfter.type = torch.bfloat16
        x = super().forward(x)
        CastsAfter.type = torch.float32
        return x


def test_a_cast_after_the_last_module_is_its_callers() -> None:
    torch.manual_seed(0)
    model = Casting(*(checkpoint_wrapper(CastsAfter()) for _ in range(3)))
    (found,) = doctor(model, batch()).of("error")
    assert found.place == "0, 1, 2" and "its own code computed other values for backward in its replay" in found.text


def test_it_is_not_blamed_for_another_module() -> None:
    """A counter in the last module, which nothing reads, beside dropout that is drawn anew before it."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    layers = [nn.Sequential(nn.Dropout(0.5), Counts(WIDTH, WIDTH)) for _ in range(2)]
    layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts(WIDTH, WIDTH)))
    model = nn.Sequential(*(checkpoint_wrapper(layer, preserve_rng_state=False) for layer in layers))
    x = batch().requires_grad_()
    found = [f for f in doctor(model, x).of("error") if "the gradients are off by" in f.text]
    assert [f.place for f in found] == ["0.0, 1.0"]
