"""Halves whose caller adds what they read: attention and MLP as modules of their own, as vit-pytorch has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.models.compare import close
from tests.models.derive.test_mutants import check
from tests.models.derive.written import made
from tests.models.dropout_oracle import RecordStates, with_masks
from tests.models.small import unfused

ATTENTION = """
class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.heads, self.p, self.norm = heads, p, nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(p))

    def forward(self, x):
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        o = F.dropout(weights, self.p, self.training) @ v
        return self.to_out(o.transpose(1, 2).flatten(2))
"""
MLP = """
class Block(nn.Module):
    def __init__(self, width=24, hidden=40, p=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width),
            *(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(p), nn.Linear(hidden, width), nn.Dropout(p)),
        )

    def forward(self, x):
        return self.net(x)
"""
SOURCES = {"attention": ATTENTION, "mlp": MLP}
TEXTS = {
    "attention": "halves=attn attn.pre=layernorm attn.joint=1 attn.p_res=0.2 attn.residual=0 attn.p_attn=0.2",
    "mlp": "halves=ffn ffn.pre=layernorm ffn.p_res=0.2 ffn.residual=0 ffn.act=gelu ffn.p_hidden=0.2",
}
RETURNS = {"attention": "return self.to_out(o.transpose(1, 2).flatten(2))", "mlp": "return self.net(x)"}


def given(tokens: int = 12, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, tokens, 24, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_half_alone_is_derived(kind: str) -> None:
    found = derive(made(SOURCES[kind], p=0.2), (given(),), {})
    assert found.proof is not None, found.why
    assert set(TEXTS[kind].split()) <= set(found.proof.text.split()), found.proof.text
    assert check(made(SOURCES[kind]).double(), (given(13, torch.float64),))


# What the half returns, in place of r, and the words of what is read; none where it is no half at all, and rest where
# the half is read and what comes after it stays the layer's own.
CHANGED: dict[str, str] = {
    "2.0 * ({r})": "m=2.0",
    "F.layer_norm({r}, (24,))": "out=layernorm",
    "F.rms_norm({r}, (24,), eps=1e-6)": "out=rmsnorm out_eps=1e-06",
    "x + {r}": "",
    "({r}).tanh()": "rest",
    "self.norm(x) + {r}": "none",
    "2 * x + {r}": "none",
    "({r}).flip(1)": "rest",
    "({r})[:, :1].expand_as(x)": "none",
}


@pytest.mark.parametrize(("change", "words"), CHANGED.items(), ids=CHANGED)
@pytest.mark.parametrize("kind", SOURCES)
def test_what_a_half_makes_of_its_product(kind: str, change: str, words: str) -> None:
    source, name = SOURCES[kind], {"attention": "attn", "mlp": "ffn"}[kind]
    if kind == "mlp":
        change = change.replace("self.norm(", "self.net[0](")
    text = source.replace(RETURNS[kind], "return " + change.format(r=RETURNS[kind].removeprefix("return ")))
    layer, args = made(text).double(), (given(13, torch.float64),)
    found = derive(layer, args, {})
    assert check(layer, args) == (words != "none"), found.why
    if words != "none":
        assert found.proof is not None
        read = found.proof.text.split()
        assert (found.here.rest is not None) == (words == "rest")
        assert {f"{name}.{word}" for word in words.split() if word != "rest"} <= set(read)
        assert (f"{name}.residual=0" in read) == (not change.startswith("x +"))


def test_before_another_half_it_is_alone() -> None:
    """A block has both halves with a residual: of attention without one before an MLP with one, one is read."""
    both = (
        ATTENTION.replace("class Block", "class Attention")
        + """
class Block(nn.Module):
    def __init__(self, width=24, p=0.0):
        super().__init__()
        self.attention = Attention(width, p=p)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x):
        h = self.attention(x)
        return h + self.down(F.gelu(self.up(self.norm(h))))
"""
    )
    layer, args = made(both).double(), (given(13, torch.float64),)
    found = derive(layer, args, {})
    assert found.here.rest is not None and found.proof is not None
    assert found.proof.text.startswith(("halves=attn ", "halves=ffn "))
    assert check(layer, args)


class Transformer(nn.Module):
    """Blocks of two modules each, to whose results the model itself adds what they read."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        pair = nn.ModuleList([made(ATTENTION, p=p).double(), made(MLP, p=p).double()])
        self.layers = nn.ModuleList([pair, copy.deepcopy(pair)])

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:  # type: ignore[misc]
            x = attention(x) + x
            x = mlp(x) + x
        return x


def step(model: nn.Module) -> dict[str, Tensor]:
    """The result of a model and all gradients."""
    x = given(9, torch.float64).requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.square().mean().backward()
    found: dict[str, Any] = {"y": y.detach(), "x": x.grad}
    return found | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("keep", ["inputs", "attention", "all"])
def test_a_converted_model_steps_as_it_did(keep: str) -> None:
    plain = Transformer()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted, keep=keep)
    assert [(layer.family, layer.path) for layer in report.layers] == [("derived", "fused")] * 4
    with unfused() as reasons:
        got = step(converted)
    assert not reasons, reasons
    close(got, step(plain), 1e-10)


def test_a_converted_model_drops_where_it_did() -> None:
    plain = Transformer(p=0.2)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    with RecordStates() as recorded, unfused() as reasons:
        got = step(converted)
    assert not reasons, reasons
    halves: list[nn.Module] = [half for pair in plain.layers for half in pair]  # type: ignore[union-attr, misc]
    sites = lambda half: ((0, 2), (0, 3)) if hasattr(half, "net") else ((0, 0), (0, 1))  # noqa: E731
    with with_masks(halves, recorded.states, sites):
        want = step(plain)
    close(got, want, 1e-10)
