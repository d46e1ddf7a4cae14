"""Layers of which the FFN half is derived, and what comes before it runs as it is written: linear attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.accounting import saved_bytes
from tests.models.compare import close, equal
from tests.models.derive.second_halves import FUSED_TOO, LINEAR, NOT_FUSED, SEVERAL
from tests.models.derive.test_halves import Stack, draws_at, replays_its_draws, same, step
from tests.models.derive.test_mutants import in_double
from tests.models.derive.written import LLAMA, arguments, made
from tests.models.small import segmented, unfused


def twins(source: str = LINEAR, p: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A model and its converted copy."""
    plain = Stack(source, p)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted, **options)
    assert [(layer.family, layer.path) for layer in report.layers] == [("derived", "part")] * 2, str(report)
    return plain, converted


@pytest.mark.parametrize("source", [LINEAR, SEVERAL], ids=["values", "several tensors"])
@pytest.mark.parametrize(("old", "new"), [("nothing", "else"), *FUSED_TOO])
def test_the_ffn_half_is_derived(source: str, old: str, new: str) -> None:
    if source is SEVERAL:
        old, new = (
            text.replace("(x))", "(x), decay=self.gain)").replace("attn(x)", "attn(x, self.gain)")
            for text in (old, new)
        )
    plain, converted = twins(source.replace(old, new))
    for tokens in (9, 14):
        same(plain, converted, tokens=tokens)
    converted.eval()
    same(plain.eval(), converted)
    with torch.no_grad():
        x = torch.randn(2, 9, 24, dtype=torch.float64)
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change", NOT_FUSED, ids=[new.strip() for _, new in NOT_FUSED])
def test_what_is_no_second_half_is_generic(change: tuple[str, str]) -> None:
    source = LINEAR.replace(*change)
    assert source != LINEAR
    plain = Stack(source)
    converted = copy.deepcopy(plain)
    assert [layer.path for layer in ckptfused.convert(converted).layers] == ["generic"] * 2
    same(plain, converted, fused=0)


def test_gradients_have_the_same_bits_for_every_keep() -> None:
    model = Stack(LINEAR, 0.2).float()
    steps = []
    for keep in ("inputs", "all"):
        converted = copy.deepcopy(model)
        ckptfused.convert(converted, keep=keep)
        converted.float()
        torch.manual_seed(5)
        x = torch.randn(2, 9, 24, requires_grad=True)
        converted(x).square().mean().backward()
        steps.append({"x": x.grad} | {n: p.grad for n, p in converted.named_parameters() if p.grad is not None})
    equal(*steps)  # type: ignore[arg-type]


def test_it_saves_its_input() -> None:
    _, converted = twins(p=0.1)
    x = torch.randn(2, 64, 24, dtype=torch.float64, requires_grad=True)
    saved = saved_bytes(lambda: converted(x), module=converted, own=[x])
    inputs = x.nbytes  # the first layer's x is own, and its result is the second's
    assert inputs <= saved <= inputs + 2048, saved  # random states
    report = ckptfused.convert(Stack(LINEAR).float())
    assert [layer.after for layer in report.layers] == [4 * 24] * 2


def test_dropout_before_the_half_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replays_its_draws(twins(p=0.2)[1], monkeypatch)


def test_dropout_of_the_fused_half_draws_at_its_sites() -> None:
    source = LINEAR.replace("Attention(width, p)", "Attention(width, 0.0)")
    draws_at(*twins(source, p=0.2), sites=((0, 3),), replayed=(1, 0))


def test_hooks_are_called() -> None:
    """Hooks before the half run as ever; where somebody watches the FFN, its modules are called."""
    plain, converted = twins()
    for model in (plain, converted):
        for layer in model.layers:
            layer.ln_1.register_forward_hook(lambda module, args, y: 2 * y)
            layer.attn.c_proj.register_forward_hook(lambda module, args, y: 3 * y)
    same(plain, converted)
    for model in (plain, converted):
        model.layers[0].c_fc.register_forward_hook(lambda module, args, y: 3 * y)
    same(plain, converted, fused=1)


def test_what_changes_is_seen() -> None:
    plain, converted = twins()
    same(plain, converted)
    for model in (plain, converted):
        model.layers[0].attn.c_proj = nn.Linear(24, 24, bias=False).double()
        nn.init.ones_(model.layers[0].attn.c_proj.weight)
        model.layers[1].attn.drop = nn.Identity()
        model.layers[1].c_fc.bias = None
    same(plain, converted)


@pytest.mark.parametrize("way", [partial(ckptfused.convert, offload=True), segmented], ids=["offload", "segments"])
def test_beside(way: Callable[[Any], Any]) -> None:
    plain = Stack(LINEAR)
    converted = copy.deepcopy(plain)
    way(converted)
    close(step(converted), step(plain), 1e-10)


def test_a_second_backward_and_a_second_derivative() -> None:
    plain, converted = twins()
    found = []
    for model in (plain, converted):
        x = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = model(x).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.square().sum().backward()
        found.append({"first": first.detach(), "second": x.grad})
    close(found[1], found[0], 1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["mask", "cos"])
def test_attention_whose_mask_or_table_is_trained_runs_as_it_is(which: str) -> None:
    """A relative position bias, a trained rotary table: the op has no gradient for them, the FFN half needs none."""
    plain, given = made(in_double(LLAMA)).double(), arguments(LLAMA, tokens=13, dtype=torch.float64)
    place = {"cos": 1, "mask": 3}[which]
    converted = nn.ModuleList([copy.deepcopy(plain)])
    ckptfused.convert(converted)
    for trained in (True, False, True):
        results = []
        with unfused() as reasons:
            for layer in (plain, converted[0]):
                layer.zero_grad()
                x, *others = (t.detach().clone() for t in given)
                others[place - 1].requires_grad_(trained)
                layer(x.requires_grad_(), *others).sin().sum().backward()
                results.append({n: p.grad for n, p in layer.named_parameters()} | {"x": x.grad})
                if trained:
                    results[-1]["trained"] = others[place - 1].grad
        assert not reasons
        close(*results, 1e-10)  # type: ignore[arg-type]
        leaves = [t.detach().requires_grad_(trained and i == place) for i, t in enumerate(given)]
        found = derive(plain, (leaves[0].requires_grad_(), *leaves[1:]), {})
        assert found.proof is not None
        assert found.proof.text.startswith("halves=ffn" if trained else "halves=attn+ffn"), found.why
        assert ("needs a gradient" in found.why) is trained
