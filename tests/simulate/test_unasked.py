"""Memory that no allocator is asked for where there is no data, and what PyTorch does otherwise there: a predicted step
needs what one needs that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import plan, profile

N, C = 512, 256
Step = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Two projections and a number, all trained."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a, self.b, self.token = nn.Linear(C, C), nn.Linear(C, C), nn.Parameter(torch.tensor(0.5))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def _into_what_grows(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        grown = torch.sigmoid(h, out=h.new_empty(0))
    return m.b(h * grown)


def _resized(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h * h.detach().new_empty(N, 1).resize_(N, C).fill_(0.5))


def _solved(m: Layers, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(m.b.weight.tril() + 9 * torch.eye(C), m.a(x).mT, upper=False)


def _mask_by_name(m: Layers, x: Tensor) -> Tensor:
    return m.b(x) * torch.ones(N, N, dtype=torch.bool).tril().sum(-1)[:, None]


def _counted_by_name(m: Layers, x: Tensor) -> Tensor:
    return m.b(x) * (torch.ones(N, C) > 0).cumsum(0)


def _teacher(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(x)
    return m.b(m.a(x)) - target


def _attention(m: Layers, x: Tensor) -> Tensor:
    heads = m.a(x).view(1, N, 4, C // 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


STEPS: dict[str, Step] = {
    "out= that grows": _into_what_grows,
    "resize_": _resized,
    "a solution": _solved,
    "a mask made by name": _mask_by_name,
    "counts made by name": _counted_by_name,
    "attention": _attention,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_is_predicted(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, x = Layers(STEPS[name]).to(dtype), torch.randn(N, C, dtype=dtype)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def test_weights_that_are_met_first_without_gradients() -> None:
    """Autocast keeps its cast of a weight, with a gradient where that is asked for later."""
    model, x = Layers(_teacher), torch.randn(N, C)
    predicted, measured = (profile(model, x, device=device, autocast="bfloat16") for device in ("cpu", None))
    assert predicted.all_gradients == measured.all_gradients and predicted.saved == measured.saved
    assert measured.peak <= predicted.peak + predicted.workspace


@pytest.mark.parametrize("threads", [1, 2])
def test_a_number_that_is_learnt_and_filled_in(threads: int) -> None:
    """The prediction takes it that all are: it has at most x more than there is."""
    model, x = Layers(lambda m, x: m.a(x).masked_fill(x > 0, m.token)), torch.randn(N, C)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    finally:
        torch.set_num_threads(before)
    assert measured.peak <= predicted.peak <= measured.peak + x.nbytes


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_a_bag_saves_what_is_predicted(mode: str) -> None:
    """Where there is no data PyTorch's bags keep fewer places."""
    model, ids = nn.Sequential(nn.EmbeddingBag(50, C, mode=mode), nn.Linear(C, C)), torch.randint(0, 50, (N, 9))
    assert profile(model, ids, device="cpu").saved == profile(model, ids).saved


def test_a_plan_keeps_its_budget() -> None:
    torch.manual_seed(1)
    stack, x = nn.Sequential(*(Layers(_into_what_grows) for _ in range(4))), torch.randn(N, C)
    full: Any = profile(stack, x, device="cpu")
    for share in (0.75, 0.95):
        found = plan(stack, x, int(share * full.peak), device="cpu")
        found.apply(stack)
        assert profile(stack, x).peak <= found.budget
