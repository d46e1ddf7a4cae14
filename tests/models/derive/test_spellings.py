"""Blocks that say the same in other words: sums times a number before their norm (DeepNorm), dropout in place, products
as convolutions of one place, a third half.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from ckptfused.spec import parse
from tests.models.derive.test_unseen import C, Plain, batch
from tests.models.small import unfused

EPS = 0.05
"""So large that a norm of a sum times a number is not that of the sum."""


class Closed(Plain):
    """A post-norm block; `sums` makes what its norms take."""

    def __init__(self, sums: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.sums, self.n3, self.n4 = sums, nn.LayerNorm(C, EPS), nn.LayerNorm(C, EPS)
        self.n1, self.n2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.n3(self.sums(x, self.attn(x)))
        return self.n4(self.sums(x, self.ffn(x)))  # type: ignore[no-any-return]


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "DeepNorm": lambda x, f: x * 1.7 + f,
    "DeepNorm, by division": lambda x, f: f + x / 0.4,
    "half of the sum": lambda x, f: 0.5 * (x + f),
    "over the root of two": lambda x, f: (x + f) / math.sqrt(2),
    "all of it": lambda x, f: (1.3 * x + 0.7 * f).mul(0.9),
}
OTHER_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "minus the sum": lambda x, f: -1.0 * (x + f),
    "minus the stream": lambda x, f: x * -0.5 + f,
    "twice the stream": lambda x, f: x + x + f,
}


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(8))
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy)]


def both(block: nn.Module, path: str) -> None:
    """A converted model of two such blocks steps as it did, by this path."""
    plain = nn.Sequential(block, copy.deepcopy(block)).double()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {layer.path for layer in report.layers} == {path}, report
    for tokens in (12, 7):
        with unfused() as reasons:
            for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert bool(reasons) == (path == "generic")


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_a_sum_times_a_number_before_its_norm(sums: Callable[[Tensor, Tensor], Tensor]) -> None:
    both(Closed(sums), "fused")


@pytest.mark.parametrize("sums", OTHER_SUMS.values(), ids=OTHER_SUMS)
def test_other_sums_run_as_written(sums: Callable[[Tensor, Tensor], Tensor]) -> None:
    both(Closed(sums), "generic")


def test_a_sum_times_a_number_without_a_norm_is_no_residual() -> None:
    class Halved(Plain):
        def forward(self, x: Tensor) -> Tensor:
            x = (x + self.attn(x)) / 2
            return (x + self.ffn(x)) / 2

    both(Halved(), "generic")


class InPlace(Plain):
    """Every dropout writes to what it takes."""

    def __init__(self, p: float = 0.3, by_place: bool = False) -> None:
        super().__init__()
        self.drop = (lambda x: F.dropout(x, p, self.training, True)) if by_place else nn.Dropout(p, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(x))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.n2(x))))))


@pytest.mark.parametrize("by_place", [False, True])
def test_dropout_in_place(by_place: bool) -> None:
    found = derive(InPlace(by_place=by_place), (batch().float(),), {})
    assert found.proof is not None and not found.why
    spec = parse(found.proof.text)
    assert (spec.attn.p_res, spec.ffn.p_res, spec.ffn.p_hidden) == (0.3, 0.3, 0.3)  # type: ignore[union-attr]
    assert max(found.proof.errors.values()) < 1e-12
    both(InPlace(by_place=by_place).eval(), "fused")


def test_dropout_in_place_of_what_the_layer_was_given() -> None:
    class OfX(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    assert derive(OfX(), (batch().float(),), {}).proof is None


class Convolved(Plain):
    """Its MLP is two convolutions of `places` places (Informer, FastSpeech)."""

    def __init__(self, places: int = 1, p: float = 0.0, **options: Any) -> None:
        super().__init__()
        del self.up, self.down
        self.c1, self.c2 = nn.Conv1d(C, 48, places, **options), nn.Conv1d(48, C, 1)
        self.drop = nn.Dropout(p)

    def ffn(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.c1(self.n2(x).transpose(1, 2))))
        return self.drop(self.c2(h).transpose(1, 2))  # type: ignore[no-any-return]


def test_convolutions_of_one_place_are_products() -> None:
    both(Convolved(), "fused")
    both(Convolved(bias=False), "fused")
    found = derive(Convolved(p=0.3), (batch().float(),), {})
    assert found.proof is not None and not found.why
    assert "ffn.p_hidden=0.3" in found.proof.text and "ffn.p_res=0.3" in found.proof.text


@pytest.mark.parametrize(
    "options",
    [{"places": 3, "padding": 1}, {"groups": 2}, {"places": 3, "padding": "same", "padding_mode": "circular"}],
)
def test_other_convolutions_are_none(options: dict[str, Any]) -> None:
    block = Convolved(**options).double()
    converted = nn.Sequential(copy.deepcopy(block), copy.deepcopy(block))
    plain = copy.deepcopy(converted)
    report = ckptfused.convert(converted)
    assert all(layer.path != "fused" for layer in report.layers)
    for a, b in zip(steps(plain, batch()), steps(converted, batch()), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


class Macaron(Plain):
    """Half an MLP, attention, half an MLP (Conformer, without its convolution)."""

    def __init__(self) -> None:
        super().__init__()
        self.n0, self.up0, self.down0 = nn.LayerNorm(C), nn.Linear(C, 48), nn.Linear(48, C)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.down0(F.silu(self.up0(self.n0(x))))
        x = x + self.attn(x)
        return x + 0.5 * self.ffn(x)


def test_two_of_three_halves_are_fused() -> None:
    both(Macaron(), "part")
    found = derive(Macaron(), (batch().float(),), {})
    assert found.proof is not None and found.layout.attn is not None and found.layout.ffn is not None


class MadeBiases(Plain):
    """Biases that the layer makes of parts (timm's EVA and BEiT), or of two of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(C, 3 * C, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(C)) for _ in "qv")
        self.register_buffer("k_bias", torch.zeros(C))
        self.size, self.shift = nn.Parameter(torch.randn(48)), nn.Parameter(torch.randn(48))
        del self.qkv
        self.up.register_parameter("bias", None)

    def heads(self, x: Tensor) -> Any:
        made = F.linear(self.n1(x), self.weights.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        return (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in made.chunk(3, -1))

    def ffn(self, x: Tensor) -> Tensor:
        h = F.linear(self.n2(x), self.up.weight, self.size.exp() * self.shift)
        return self.down(F.gelu(h))  # type: ignore[no-any-return]


def test_biases_that_are_made() -> None:
    both(MadeBiases(), "fused")
    layer = nn.Sequential(MadeBiases(), MadeBiases())
    ckptfused.convert(layer)
    x = batch().float()
    before = layer(x)
    with torch.no_grad():
        layer[0].v_bias.add_(1)  # type: ignore[union-attr]
    assert not torch.allclose(before, layer(x))


def test_a_bias_of_x_is_none() -> None:
    class OfX(MadeBiases):
        def ffn(self, x: Tensor) -> Tensor:
            h = F.linear(self.n2(x), self.up.weight, self.size.exp() * self.shift * x.mean())
            return self.down(F.gelu(h))  # type: ignore[no-any-return]

    both(OfX(), "generic")
