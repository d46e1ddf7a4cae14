"""Copies of models without their data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ckptfused


class Noisy(nn.Module):
    """A layer with generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)
        self.others = {"more": [torch.Generator().manual_seed(4)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(8, generator=self.generator, device=x.device)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_model_that_holds_generators_is_predicted_and_draws_on_where_it_was(device: str) -> None:
    model, x = nn.Sequential(Noisy(), Noisy()), torch.randn(2, 8)
    before = [module.generator.get_state() for module in model]
    assert ckptfused.profile(model, x, device=device).peak > 0
    ckptfused.convert(model, budget="1GiB", batch=x, device=device)
    assert all(map(torch.equal, before, [module.generator.get_state() for module in model]))
