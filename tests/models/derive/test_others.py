"""Blocks in the styles of other libraries are derived: with dropout, at its sites, and in the modes of a step."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive import factors
from ckptfused.models.derive.derive import derive
from tests.models.compare import close
from tests.models.derive.others import FOLDED, SUMS, TOWER, called
from tests.models.derive.test_mutants import check
from tests.models.derive.written import made
from tests.models.dropout_oracle import RecordStates, with_masks
from tests.models.small import unfused

KINDS = {"tower": TOWER, "sums": SUMS, "folded": FOLDED}
WORDS = {
    "tower": "attn.joint=1 attn.post=layerscale ffn.post=layerscale attn.mask=drop ffn.act=relu",
    "sums": "attn.rope=interleaved attn.mask=keep ffn.act=geglu",
    "folded": "attn.out=layernorm ffn.out=layernorm attn.mask=add ffn.act=silu",
}
RATES = {
    "tower": "attn.p_attn=0.2 attn.p_res=0.2 ffn.p_res=0.2",
    "sums": "attn.p_attn=0.2 attn.p_res=0.2",
    "folded": "attn.p_attn=0.2 ffn.p_res=0.2",
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_derived(kind: str) -> None:
    source = KINDS[kind]
    found = derive(made(source, p=0.2), called(source), {})
    assert found.proof is not None, found.why
    text = found.proof.text.split()
    assert {*WORDS[kind].split(), *RATES[kind].split()} <= set(text), text
    assert max(found.proof.errors.values()) < 1e-12
    assert {word for word in text if ".p_" in word} == set(RATES[kind].split())
    assert check(made(source).double(), called(source, tokens=13, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_derived_where_factors_stand_for_matrices(kind: str) -> None:
    """Factors stand for large matrices, of which a block may take some rows only."""
    source = KINDS[kind]
    with mock.patch.object(factors, "LEAST_FACTORED", 1):
        found = derive(made(source), called(source), {})
    assert found.proof is not None, found.why


class Stack(nn.Module):
    """Layers one after the other, all called with the same arguments beside x."""

    def __init__(self, source: str, p: float) -> None:
        super().__init__()
        block = made(source, p=p).double()
        self.layers = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *beside)
        return x


def step(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The result of a model and all gradients."""
    x = args[0].clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x, *args[1:])
    y.square().mean().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[dict-item]


@pytest.mark.parametrize("keep", ["inputs", "mid", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_of_them_steps_as_it_did(kind: str, keep: str) -> None:
    source = KINDS[kind]
    plain = Stack(source, p=0.0)
    converted = copy.deepcopy(plain)
    args = called(source, dtype=torch.float64)
    report = ckptfused.convert(converted, keep=keep)
    assert [layer.family for layer in report.layers] == ["derived"] * 2
    with unfused() as reasons:
        got, want = step(converted, args), step(plain, args)
    assert not reasons, reasons
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        # Double precision on both sides, each with its own order of sums.
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


SITES = {"sums": ((0, 0), (0, 1)), "folded": ((0, 0), (0, 3))}
"""Which op and site each dropout of a layer is, in order."""


@pytest.mark.parametrize("kind", SITES)
def test_a_converted_model_drops_where_it_did(kind: str) -> None:
    source = KINDS[kind]
    plain = Stack(source, p=0.2)
    converted = copy.deepcopy(plain)
    args = called(source, dtype=torch.float64)
    ckptfused.convert(converted)
    with RecordStates() as recorded, unfused() as reasons:
        got = step(converted, args)
    assert not reasons, reasons
    with with_masks(list(plain.layers), recorded.states, lambda layer: SITES[kind]):
        want = step(plain, args)
    close(got, want, 1e-10)


def test_layerscale_alone_is_trained() -> None:
    """Its gradient needs none of the projection's before it."""
    model = Stack(TOWER, p=0.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gamma" in name)
    converted = copy.deepcopy(model)
    ckptfused.convert(converted)
    args = called(TOWER, dtype=torch.float64)
    got, want = step(converted, args), step(model, args)
    assert {name for name in got if "gamma" in name} == {name for name in want if "gamma" in name} != set()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
