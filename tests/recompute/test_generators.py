"""Generators that a checkpointed function draws from by name: the replay draws alike, and leaves them as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptfused import checkpoint


def scaled(x: Tensor, by: float) -> Tensor:
    return (x * by).sin()


class Static(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.drawn(x)

    @staticmethod
    def drawn(x: Tensor) -> Tensor:
        return scaled(x, random.random())


class OfTheClass(Static):
    @classmethod
    def drawn(cls, x: Tensor) -> Tensor:  # type: ignore[override]
        return scaled(x, np.random.rand())


class Property(nn.Module):
    @property
    def rate(self) -> float:
        return random.random()

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.rate)


class Imported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import random as drawn

        return scaled(x, drawn.random())


def imported_name(x: Tensor) -> Tensor:
    from random import random as drawn

    return scaled(x, drawn())


def imported_numpy(x: Tensor) -> Tensor:
    import numpy

    return scaled(x, numpy.random.rand())


def imported_module(x: Tensor) -> Tensor:
    from numpy import random as drawn

    return scaled(x, drawn.rand())


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "static": Static,
    "of the class": OfTheClass,
    "property": Property,
    "imported": Imported,
    "imported name": lambda: imported_name,
    "imported numpy": lambda: imported_numpy,
    "imported module": lambda: imported_module,
    "by another function": lambda: lambda x: imported_name(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_draws_are_alike(name: str) -> None:
    found = []
    for call in (lambda function, x: function(x), checkpoint):
        random.seed(0)
        np.random.seed(0)
        x = torch.ones(1, requires_grad=True)
        call(FUNCTIONS[name](), x).sum().backward()
        found.append((x.grad, random.random(), np.random.rand()))
    assert found[0] == found[1]


def test_a_module_that_is_an_attribute_of_the_class_that_a_method_is_bound_to() -> None:
    class Holder:
        layer: nn.Module

        @classmethod
        def applied(cls, x: Tensor) -> Tensor:
            return cls.layer(x).sin()

    layers, found = [nn.Linear(4, 4) for _ in range(3)], []
    for call in (lambda function, x: function(x), checkpoint):
        x = y = torch.ones(4, requires_grad=True)
        for Holder.layer in layers:
            y = call(Holder.applied, y)
        y.sum().backward()
        found.append(x.grad)
        assert Holder.layer is layers[-1]
    assert torch.equal(*found)


def test_attributes_of_the_class_that_a_method_is_bound_to() -> None:
    """Its own, and those of a class above."""

    class Above:
        factor = 1.0

        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return (x * cls.factor).sin()

    class Below(Above):
        pass

    for kind in (Above, Below):
        Above.factor = 1.0
        x = torch.ones(1, requires_grad=True)
        y = checkpoint(kind.scaled, x)
        Above.factor = 2.0
        y.sum().backward()
        assert x.grad is not None and Above.factor == 2.0
        torch.testing.assert_close(x.grad, torch.ones(1).cos())
