"""A proof at any width: matrices are held as factors, and what a layer does to one is seen all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused.models.derive import copies, factors
from ckptfused.models.derive.copies import wide
from ckptfused.models.derive.derive import Derivation, derive
from ckptfused.models.derive.factors import Factored, Factors, UnfactoredError
from tests.models.derive.written import GPT, LLAMA, arguments, made

RIGHT = [
    ("f = self.w2(h)", "f = h @ self.w2.weight.T"),
    ("f = self.w2(h)", "f = torch.matmul(h, self.w2.weight.transpose(0, 1))"),
    ("f = self.w2(h)", "f = torch.mm(h.flatten(0, 1), self.w2.weight.t()).view(x.shape)"),
    ("f = self.w2(h)", "f = F.linear(input=h, weight=self.w2.weight, bias=None)"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.to(h.dtype).contiguous())"),
]
"""Ways to say a product."""
WRONG = [
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.flip(0))"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.roll(1, 1))"),
    ("f = self.w2(h)", "f = F.linear(h, torch.cat((self.w2.weight[1:], self.w2.weight[:1])))"),
    ("f = self.w2(h)", "f = F.linear(h, torch.cat(self.w2.weight.chunk(2)[::-1]))"),
    ("f = self.w2(h)", "f = torch.cat([F.linear(h, w) for w in self.w2.weight.chunk(2)[::-1]], -1)"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight[:1]).expand(x.shape)"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.tril())"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.bfloat16().type_as(h))"),
    ("f = self.w2(h)", "f = F.linear(h, Doubled.apply(self.w2.weight))"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight.data)"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight, h.mean((0, 1))[:24])"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight) + 0 * self.w2.weight.sum()"),
    ("f = self.w2(h)", "f = F.linear(h, self.w2.weight @ self.w1.weight @ self.w1.weight.T)"),
    ("self.wo(y)", "F.linear(y, self.wo.weight.T)"),
    ("self.wo(y)", "F.linear(y, self.wo.weight + self.wo.weight.T)"),
    ("self.wo(y)", "y @ self.wo.weight.view(C, C)[::2].repeat_interleave(2, 0)"),
]
"""What is no product with the layer's matrix as it is."""


class Doubled(torch.autograd.Function):
    """The identity of a weight, whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def read(change: tuple[str, str]) -> Derivation:
    """What is derived of the block with a change."""
    assert LLAMA.count(change[0]) == 1
    layer = made(LLAMA.replace(*change))
    type(layer).forward.__globals__["Doubled"] = Doubled
    return derive(layer, arguments(LLAMA), {})


@pytest.fixture(params=[1, factors.LEAST_FACTORED], ids=["factors", "whole"])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(factors, "LEAST_FACTORED", request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", RIGHT, ids=[new for _, new in RIGHT])
def test_a_product_is_read_as_one(change: tuple[str, str], least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if least == 1:
        monkeypatch.setattr(copies, "MOST_WEIGHTS", 24 * 8)  # norms and biases alone
    found = read(change)
    assert found.proof is not None, found.why
    assert found.proof.text == derive(made(LLAMA), arguments(LLAMA), {}).proof.text  # type: ignore[union-attr]
    assert max(found.proof.errors.values()) < 1e-12
    assert {f"the gradient of {name}" for name, _ in made(LLAMA).named_parameters()} <= found.proof.errors.keys()


@pytest.mark.parametrize("change", WRONG, ids=[new for _, new in WRONG])
def test_what_is_done_to_a_matrix_is_seen(change: tuple[str, str], least: int) -> None:
    found = read(change)
    assert found.why and (found.proof is None or found.layout.attn is None)  # or the other half alone


def test_a_matrix_in_another_place_is_another_one(least: int) -> None:
    """Each of two matrices of one shape stands at its own place."""
    found = derive(made(LLAMA.replace("self.w1(n)) * self.w3(n)", "self.w3(n)) * self.w1(n)")), arguments(LLAMA), {})
    assert found.proof is not None
    maps = found.proof.layout.ffn.maps  # type: ignore[union-attr]
    assert [m and m.weight for m in maps] == ["w3.weight", "w1.weight", "w2.weight"]


@pytest.mark.parametrize("source", [LLAMA, GPT])
def test_a_wide_layer_takes_no_memory(source: str) -> None:
    """A layer of a thousand million numbers is proved by some hundred thousand."""
    with torch.device("meta"):
        layer = made(source, width=16384, heads=128, **({"hidden": 16384} if source is LLAMA else {}))
    for _, module in layer.named_modules():
        for name, t in module._buffers.items():
            module._buffers[name] = torch.tril(torch.ones(t.shape[-2:])).view(t.shape)  # type: ignore[union-attr]
    assert sum(p.numel() for p in layer.parameters()) > 2**30
    copy = wide(layer, torch.Generator())
    assert sum(p.untyped_storage().nbytes() for p in copy.parameters()) < 2**21
    _, *beside = arguments(source)
    given = (torch.empty(2, 12, 16384, device="meta"), *(t.to("meta") for t in beside))
    if source is LLAMA:
        given = (given[0], *(torch.empty(12, 128, device="meta") for _ in range(2)), given[3])
    found = derive(layer, given, {})
    assert found.proof is not None, found.why
    assert max(found.proof.errors.values()) < 1e-12


def test_what_is_no_product_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LEAST_FACTORED", 1)
    monkeypatch.setattr(copies, "MOST_WEIGHTS", 24 * 8)
    found = read(("f = self.w2(h)", "f = F.linear(h, self.w2.weight * 2)"))
    line = LLAMA[: LLAMA.index("f = self.w2(h)")].count("\n") + 1
    assert found.proof is None and f"written.py:{line}: mul of a weight, which is no product with it" in found.why


def test_arrangements_of_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned, cut into rows, narrowed and cast it stands for what a matrix of these factors would."""
    monkeypatch.setattr(factors, "LEAST_FACTORED", 1)
    layer = torch.nn.Linear(6, 9, bias=False)
    with torch.no_grad():
        layer.weight = torch.nn.Parameter(factors.stand_in(layer.weight))  # type: ignore[arg-type]
    factored = Factored(layer, torch.Generator().manual_seed(0))
    whole = torch.matmul(*Factors(*factored.leaves(layer.weight)))
    x = torch.randn(4, 6, dtype=torch.float64)
    for arrange in (
        lambda w: w.chunk(3)[1],
        lambda w: w.split((2, 3, 4))[2],
        lambda w: w.split(2, dim=0)[1],
        lambda w: w.narrow(0, 1, 4),
        lambda w: w[2:7].t().mT,
        lambda w: w.permute(1, 0).transpose(-1, -2).transpose(0, 0),
        lambda w: w.double().type_as(w).contiguous(),
    ):
        with factored:
            y = torch.nn.functional.linear(x, arrange(layer.weight))
        torch.testing.assert_close(y, x @ arrange(whole).t(), rtol=1e-13, atol=1e-13)
    with factored:
        y = torch.nn.functional.linear(x[:, 2:5], layer.weight.narrow(1, 2, 3))
    torch.testing.assert_close(y, x[:, 2:5] @ whole[:, 2:5].t(), rtol=1e-13, atol=1e-13)
    for refused in (
        lambda w: w[:, :3],
        lambda w: w.chunk(2, 1),
        lambda w: w.float(),
        lambda w: w[0],
        lambda w: w @ x.t(),
    ):
        with factored, pytest.raises(UnfactoredError):
            refused(layer.weight)
    assert bool(torch.nn.functional.linear(x, layer.weight).isnan().all())
