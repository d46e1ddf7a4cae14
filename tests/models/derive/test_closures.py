"""A function that a layer holds is followed to the layer's own modules, and to no others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.models.derive.test_others import step
from tests.models.derive.written import GPT, arguments, made
from tests.models.small import unfused

MLP = "self.dropout(self.c_proj(new_gelu(self.c_fc(self.ln_2(x)))))"
HELD = """
        m = self.mlp = nn.ModuleDict({"c_fc": self.c_fc, "c_proj": self.c_proj, "drop": self.dropout})
        self.mlpf = lambda x, *, act=new_gelu: m.drop(m.c_proj(act(m.c_fc(x))))
"""
OVER_ITSELF = """
        self.mlpf = lambda x: self.dropout(self.c_proj(new_gelu(self.c_fc(x))))
"""
SCALED = """
        import types
        scale = types.SimpleNamespace(by=1.0)
        m = self.mlp = nn.ModuleDict({"c_fc": self.c_fc, "c_proj": self.c_proj, "drop": self.dropout})
        self.mlpf = lambda x: m.drop(m.c_proj(new_gelu(m.c_fc(x * scale.by))))
        self.scale = scale
"""


def with_lambda(held: str = HELD) -> str:
    """minGPT's block, whose MLP is a lambda that it holds."""
    built = "self.dropout = nn.Dropout(p)\n"
    assert GPT.count(MLP) == 1 and GPT.count(built) == 1
    return GPT.replace(built, built + held).replace(MLP, "self.mlpf(self.ln_2(x))")


class Pair(nn.Module):
    """Two blocks with lambdas of their own."""

    def __init__(self, source: str, p: float = 0.0) -> None:
        super().__init__()
        block = type(made(source))
        self.layers = nn.ModuleList(block(p=p).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def agree(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        # Double precision on both sides, each with its own order of sums.
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("held", [HELD, OVER_ITSELF, SCALED])
def test_a_layer_with_a_lambda_is_fused(held: str) -> None:
    source = with_lambda(held)
    found = derive(made(source, p=0.1), arguments(source), {})
    assert found.proof is not None, found.why
    assert {"ffn.act=gelu_tanh", "ffn.p_res=0.1", "attn.p_attn=0.1"} <= set(found.proof.text.split())
    plain, converted = Pair(source), Pair(source)
    assert len(ckptfused.convert(converted).layers) == 2
    args = arguments(source, dtype=torch.float64)
    with unfused() as reasons:
        got = step(converted, args)
    assert not reasons
    agree(got, step(plain, args))


@pytest.mark.parametrize("kind", ["types.SimpleNamespace", "argparse.Namespace"])
def test_what_it_is_closed_over_is_watched(kind: str) -> None:
    """A number that the lambda finds through its closure, changed after a call."""
    source = with_lambda(
        SCALED.replace("types.SimpleNamespace", kind).replace("import types", "import argparse, types")
    )
    plain, converted = Pair(source), Pair(source)
    assert len(ckptfused.convert(converted).layers) == 2
    args = arguments(source, dtype=torch.float64)
    step(converted, args)
    for model in (plain, converted):
        for layer in model.layers:
            layer.scale.by = 0.5
    agree(step(converted, args), step(plain, args))


def replaced(layer: Any) -> None:
    """The dictionary is another one, the lambda has the old one."""
    torch.manual_seed(7)
    layer.mlp = nn.ModuleDict({"c_fc": nn.Linear(24, 96), "c_proj": nn.Linear(96, 24), "drop": nn.Dropout(0.0)})
    layer.c_fc, layer.c_proj = nn.Linear(24, 96), nn.Linear(96, 24)
    layer.double()


def put_in(layer: Any) -> None:
    """A projection in the dictionary is another one."""
    torch.manual_seed(7)
    layer.mlp["c_fc"] = layer.c_fc = nn.Linear(24, 96).double()


def another(layer: Any) -> None:
    """The lambda is another one."""
    m = layer.mlp
    layer.mlpf = lambda x: m.drop(m.c_proj(torch.relu(m.c_fc(x))))


@pytest.mark.parametrize("change", [replaced, put_in, another])
@pytest.mark.parametrize("before", [True, False], ids=["before-convert", "after-a-call"])
def test_it_runs_what_the_lambda_says(change: Any, before: bool) -> None:
    source = with_lambda()
    plain, converted = Pair(source), Pair(source)
    args = arguments(source, dtype=torch.float64)
    if not before:
        assert len(ckptfused.convert(converted).layers) == 2
        step(converted, args)
    for model in (plain, converted):
        for layer in model.layers:
            change(layer)
    if before:
        assert len(ckptfused.convert(converted).layers) == 2
    agree(step(converted, args), step(plain, args))


def test_a_copy_whose_lambda_has_the_modules_of_another_runs_as_it_is() -> None:
    """`copy.deepcopy` leaves a function's closure alone: the copy computes with the weights of the first."""
    source = with_lambda()
    first = made(source).double()
    second = copy.deepcopy(first)
    found = derive(second, arguments(source, dtype=torch.float64), {})
    assert found.proof is None and "comes from no call that was seen" in found.why


def test_a_lambda_that_goes_past_an_adapter_is_not_fused() -> None:
    """PEFT wraps a projection; the lambda has the one that is wrapped, and calls no adapter."""
    peft = pytest.importorskip("peft")
    source = with_lambda("\n        fc = self.c_fc\n        self.mlpf = lambda x: self.c_proj(new_gelu(fc(x)))\n")
    layer = made(source).double()
    assert derive(layer, arguments(source, dtype=torch.float64), {}).proof is not None
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["c_fc"], init_lora_weights=False), layer)
    found = derive(adapted, arguments(source, dtype=torch.float64), {})
    assert found.proof is None and "comes from no call that was seen" in found.why
