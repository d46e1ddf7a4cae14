"""What is there before a step, beside parameters and buffers: batches, memories of earlier steps, what optimizers hold
in attributes of their own. Predicted and measured steps count it alike."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from ckptfused import convert, profile

C = 64


class Rows(nn.Module):
    """A model that lays its input out as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(C, C)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.a(x.reshape(-1, C)).view(x.shape), y)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(x)).flatten(0, 1), y.reshape(-1))


def same(model: nn.Module, batch: Any, optimizer: Any = None) -> int:
    """The peak of a step, which is predicted as it is measured."""
    predicted, measured = profile(model, batch, optimizer, device="cpu"), profile(model, batch, optimizer)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)
    assert (predicted.weights, predicted.optimizer) == (measured.weights, measured.optimizer)
    return measured.peak


def test_a_batch_that_is_split_off() -> None:
    """Inputs and targets of a sequence are slices of it, which are copied where rows are wanted."""
    whole = torch.randn(8, 101, C)
    assert same(Rows(), (whole[:, :-1], whole[:, 1:])) > same(Rows(), (whole[:, :-1].contiguous(), whole[:, 1:]))
    ids = torch.randint(0, 100, (64, 101))
    same(Words(), (ids[:, :-1], ids[:, 1:]))


def test_columns_and_crops() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.Tanh())
    same(model, torch.randn(8, 100, 2 * C)[..., :C])
    same(model, torch.randn(8, 100, 8 * C)[..., ::8])
    same(model, torch.randn(8, 1, C).expand(8, 100, C))


def test_a_batch_of_a_data_set_is_no_data_set() -> None:
    model, data = nn.Sequential(nn.Linear(C, C), nn.Tanh()), torch.randn(100_000, C)
    assert same(model, data[:50]) == same(model, data[:50].clone())
    ids = torch.randint(0, 100, (8, 101))
    both = profile(Words(), (ids[:, :-1], ids[:, 1:]), device="cpu").weights
    assert both == profile(Words(), (ids, ids), device="cpu").weights == 4 * (2 * 16 * 100 + 100) + ids.nbytes


@dataclass(frozen=True)
class Given:
    x: Tensor
    scale: float = 1.0


def test_a_batch_that_is_a_dataclass() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(C, C)

        def forward(self, given: Given) -> Tensor:
            return self.a(given.x).tanh() * given.scale

    given = Given(torch.randn(400, C), 0.5)
    assert profile(Scaled(), {"given": given}).weights == 4 * (C * C + C) + given.x.nbytes
    same(Scaled(), {"given": given})
    same(Scaled(), (given,))


class Remembers(nn.Module):
    """A layer that has the hidden values of the last batch, as Transformer-XL's, behind a wide one that is not trained,
    which sets the peak while the old ones are there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(C, 16 * C), nn.Linear(16 * C, C), nn.Linear(C, C)
        self.memory: dict[str, Tensor] = {}
        for module in (self.up, self.down):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wide = self.down(self.up(x).tanh())
        h = self.out(wide)
        if self.memory:
            h = h + self.memory["h"].mean(0)
        self.memory["h"] = h.detach().clone()
        return h.square().mean()


def test_what_a_model_remembers() -> None:
    """A second step has the memory of the first, until it makes its own."""
    model, x = Remembers(), torch.randn(512, C)
    peak = same(model, x)
    model(x)
    assert same(model, x) == peak
    accumulated = [profile(model, x, AdamW, device, gradient_accumulation_steps=3).peak for device in ("cpu", None)]
    assert accumulated[0] == accumulated[1]


def test_gradients_of_a_batch() -> None:
    """No step ends them."""
    model, x = nn.Sequential(nn.Linear(C, C), nn.Tanh()), torch.randn(300, C, requires_grad=True)
    assert same(model, x) >= profile(model, x.detach()).peak + x.nbytes and x.grad is None


class Looked(nn.Module):
    """Layers whose results somebody looks at by hooks, in a dict, or that keep their own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(C, 8 * C), nn.Tanh(), nn.Linear(8 * C, 8)), dict[str, Tensor]()
        for name, module in self.net.named_children():
            module.register_forward_hook(self._keep(name, own))

    def _keep(self, name: str, own: bool) -> Any:
        def keep(module: Any, args: Any, out: Tensor) -> None:
            if own:
                module.last = out.detach()
            else:
                self.seen[name] = out

        return keep

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("own", [False, True])
def test_results_that_somebody_looks_at(own: bool) -> None:
    """A step replaces them one by one: they are not there twice."""
    model, x = Looked(own), torch.randn(256, C)
    measured = profile(model, x)
    assert measured.peak <= profile(model.net, x).peak + 4 * 256 * 8 * C


def test_a_table_in_a_plain_object() -> None:
    model, x = Rows(), torch.randn(8, 100, C)
    model.tables = SimpleNamespace(cosines=torch.randn(1000, C), more=[torch.randn(10, C)])  # type: ignore[assignment]
    same(model, (x, x))
    assert profile(model, (x, x)).weights == 4 * (C * C + C + 1010 * C) + x.nbytes


class Base(Optimizer):
    """An optimizer around another, as those that look ahead, or ascend first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = AdamW(self.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Master(Optimizer):
    """An optimizer that has weights in full precision, and their average."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.master = [p.detach().float().clone().requires_grad_() for p in self.param_groups[0]["params"]]
        self.average = {"weights": [p.detach().clone() for p in self.master]}
        self.base = SGD(self.master, 0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for mine, p, average in zip(self.master, self.param_groups[0]["params"], self.average["weights"], strict=True):
            mine.grad = p.grad.float()
            average.lerp_(mine, 0.1)
        self.base.step()
        for mine, p in zip(self.master, self.param_groups[0]["params"], strict=True):
            p.copy_(mine)
            mine.grad = None


@pytest.mark.parametrize(("kind", "copies"), [(Base, 2), (Master, 3)])
def test_what_an_optimizer_holds_in_attributes(kind: Any, copies: int) -> None:
    model, x = nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)), torch.randn(8, C)
    same(model, x, kind)
    weights = sum(p.nbytes for p in model.parameters())
    assert copies * weights <= profile(model, x, kind, device="cpu").optimizer < copies * weights + 64


class Clips(AdamW):
    """An optimizer that runs on tensors with data alone."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        return super().step(closure)


@pytest.mark.parametrize("kind", [Clips, LBFGS])
def test_no_budget_with_an_optimizer_that_is_not_counted(kind: Any) -> None:
    model, x = nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)), torch.randn(8, C)
    with pytest.raises(ValueError, match=f"no plan keeps a budget where {kind.__name__} takes no step without data"):
        convert(model, budget="1GiB", batch=x, optimizer=kind)


class Keeps(nn.Module):
    """A layer that keeps its probabilities, for somebody to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, C // 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        p = (q @ k.mT / 4).softmax(-1)
        self.last = p.detach()
        x = x + self.out((p @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


@pytest.mark.parametrize("share", [0.97, 0.93])
def test_a_budget_where_layers_keep_what_they_made(share: float) -> None:
    """A plan has what the step before left in them; what is remembered of layers holds none of it."""
    torch.manual_seed(1)
    model, x = nn.Sequential(*(Keeps() for _ in range(4))), torch.randn(4, 100, C)
    full = profile(model, x, AdamW, device="cpu")
    assert full.left == 4 * 4 * 4 * 4 * 100 * 100
    budget = int(share * full.peak)
    convert(model, budget=budget, batch=x, optimizer=AdamW)
    for _ in range(3):
        assert profile(model, x, AdamW).peak <= budget


def test_the_gradient_of_a_dataclass_is_given_back() -> None:
    """A measured step leaves a batch as it was, whatever holds its tensors."""
    given = Given(torch.randn(8, C, requires_grad=True))

    class Reads(nn.Linear):
        def forward(self, given: Given) -> Tensor:  # type: ignore[override]
            return super().forward(given.x)

    profile(Reads(C, C), (given,))
    assert given.x.grad is None
