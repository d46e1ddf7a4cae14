"""Layers that put two tensors side by side and return what becomes of both (Flux's single blocks) are one op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from tests.accounting import saved_bytes
from tests.models.derive.modulated import SINGLE
from tests.models.derive.written import made
from tests.models.small import unfused

JOIN, PART = "x = torch.cat([text, x], 1)", "return x[:, :count], x[:, count:]"
STREAMS = SINGLE.replace(
    "def forward(self, x, cond):", f"def forward(self, x, text, cond):\n        count = text.shape[1]\n        {JOIN}"
).replace("        return x\n", f"        {PART}\n")
WAYS = {
    "the text first": (),
    "the text last": ((JOIN, "x = torch.cat([x, text], dim=-2)"), (PART, "return x[:, -count:], x[:, :-count]")),
    "the text returned last": ((PART, "return x[:, count:], x[:, :count]"),),
    "split": ((PART, "return x.split([count, x.shape[1] - count], 1)"),),
    "in a dict": ((PART, "return {'said': x[:, :count], 'x': x[:, count:]}"),),
}
OTHERS = {
    "another reads the text": ((JOIN, f"cond = cond + text.mean(1); {JOIN}"),),
    "another reads x": ((JOIN, f"first = x; {JOIN}"), (PART, "return x[:, :count], x[:, count:] + first")),
    "parts that overlap": ((PART, "return x[:, :count + 1], x[:, count:]"),),
    "parts in the other order": ((PART, "return x[:, -count:], x[:, :-count]"),),
    "a part of something else": ((PART, "return x[:, :count], (2 * x)[:, count:]"),),
    "twice the same": ((JOIN, "x = torch.cat([text, text, x], 1)"), (PART, "return x[:, :count], x[:, 2 * count:]")),
    "one is returned twice": ((PART, "return x[:, :count], x[:, count:], x[:, count:]"),),
    "one without a graph": (
        (PART, "with torch.no_grad():\n            text = x[:, :count]\n        return text, x[:, count:]"),
    ),
    "picked by index": ((PART, "return x[:, :count], x.index_select(1, torch.arange(count, x.shape[1]))"),),
}


class Stack(nn.Module):
    """Layers through which two streams go; the result is of both."""

    def __init__(self, changes: Any = (), layers: int = 3) -> None:
        super().__init__()
        source = STREAMS
        for old, new in changes:
            assert source.count(old) == 1
            source = source.replace(old, new)
        block = made(source)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(layers))
        torch.manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor, text: Tensor, cond: Tensor) -> Tensor:
        count = text.shape[1]
        for block in self.blocks:
            found = block(x, text, cond)
            one, other, *_ = found.values() if isinstance(found, dict) else found
            text, x = (one, other) if one.shape[1] == count else (other, one)
        return torch.cat([text, x], 1)


def call(tokens: int = 13, count: int = 5, batch: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, tokens, 24), (batch, count, 24), (batch, 24))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def step(model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in args]
    y = model(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *model.parameters()], dy)]


def alike(model: nn.Module, own: nn.Module, args: tuple[Tensor, ...], fused: bool = True) -> None:
    expected = step(model, args)
    with unfused() as reasons:
        found = step(own, args)
    assert bool(reasons) != fused, reasons
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_every_gradient_is_the_layers_own(way: str, keep: str) -> None:
    model = Stack(WAYS[way]).double()
    own = copy.deepcopy(model)
    ckptfused.convert(own, keep=keep)
    for sizes in ((13, 5), (9, 3), (40, 17), (3, 9)):
        alike(model, own, call(*sizes))
    with torch.no_grad():
        torch.testing.assert_close(own.eval()(*call()), model.eval()(*call()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", OTHERS)
def test_others_run_as_written(way: str) -> None:
    model = Stack(OTHERS[way], layers=1).double()
    own = copy.deepcopy(model)
    ckptfused.convert(own)
    alike(model, own, call(), fused=False)


def test_what_is_returned_first_may_depend_on_lengths() -> None:
    """At the lengths of a proof it was the other."""
    model = Stack(((PART, "return (x[:, :count], x[:, count:])[:: 1 if count > 4 else -1]"),), layers=1).double()
    own = copy.deepcopy(model)
    ckptfused.convert(own)
    for sizes in ((13, 5), (13, 3), (7, 9)):
        found, expected = (each.blocks[0](*call(*sizes)) for each in (own, model))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_layer_saves_both_once() -> None:
    model, args = Stack().float(), call(64, 32, dtype=torch.float32)
    ckptfused.convert(model)
    leaves = [t.requires_grad_() for t in args]
    both = leaves[0].nbytes + leaves[1].nbytes
    saved = saved_bytes(lambda: model(*leaves), module=model, own=leaves)
    assert 3 * both <= saved <= 3 * both + 8192, (saved, both)  # vectors of samples


def test_what_is_returned_may_be_written_to() -> None:
    """Slices of the layer's own result may."""
    model, args = Stack(layers=1).double(), call()
    own = copy.deepcopy(model)
    ckptfused.convert(own)
    found = []
    for each in (model, own):
        leaves = [t.detach().requires_grad_() for t in args]
        said, x = each.blocks[0](*leaves)
        x.mul_(said.mean())
        found.append(torch.autograd.grad(x.square().sum() + said.sum(), [*leaves, *each.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_both_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is no argument of the layer's."""
    from ckptfused.models.derive import calls

    followed: list[torch.Size] = []
    monkeypatch.setattr(calls, "follow", lambda x: followed.append(x.shape))
    model = Stack().double()
    ckptfused.convert(model, offload=True)
    step(model, call(13, 5))
    assert followed == [(3, 18, 24)] * 3
