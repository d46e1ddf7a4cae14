"""What a converted mixture's layers keep for backward, and what backward makes again of what they let go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ckptfused
from ckptfused.models import from_input
from ckptfused.models.experts import routing
from ckptfused.recompute import made_again
from tests.accounting import CountOps, saved_bytes
from tests.models.test_experts import assert_alike, build, step


@pytest.mark.parametrize(("keep", "inputs"), [("inputs", 1), ("mid", 2)])
def test_bytes_that_a_layer_keeps(keep: str, inputs: int) -> None:
    """Its input, the FFN half's where that is asked for, and the ids that the router chose, in a byte each."""
    model = build("qwen3-moe", num_hidden_layers=1, num_experts=8, num_experts_per_tok=3).bfloat16()
    ckptfused.convert(model, keep=keep)
    layer, rows = model.model.layers[0], 64
    x = torch.randn(1, rows, 32, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(rows)[None])
    found = saved_bytes(lambda: layer(x, position_embeddings=tables), layer, tables)
    assert found == rows * (inputs * 2 * 32 + 3)


def test_bytes_that_a_generic_layer_keeps() -> None:
    """Its input, what attention made of it, and two ids and groups of two that the router chose, in a byte each."""
    model = build("deepseek-v3", num_hidden_layers=1, first_k_dense_replace=0).bfloat16()
    report = ckptfused.convert(model)
    layer, rows = model.model.layers[0], 64
    assert [found.path for found in report.layers] == ["generic"]
    x = torch.randn(1, rows, 32, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(rows)[None])
    found = saved_bytes(lambda: layer(x, position_embeddings=tables), layer, tables)
    assert found <= rows * (2 * 2 * 32 + 8)


@pytest.mark.parametrize("inside", ["mlp.gate", "post_attention_layernorm", "mlp.experts"])
def test_a_weight_that_is_there_only_while_its_module_runs_is_not_read_later(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP frees what it gathered for a module when that module's forward is over."""
    model = build("qwen3-moe", num_hidden_layers=1)
    ckptfused.convert(model)
    layer, x = model.model.layers[0], torch.randn(1, 9, 32, requires_grad=True)
    assert routing.saves_input_alone(layer, x)
    monkeypatch.setattr(from_input, "is_fully_sharded", lambda module: module is layer)
    assert routing.saves_input_alone(layer, x)
    monkeypatch.setattr(from_input, "is_fully_sharded", lambda module: module is layer.get_submodule(inside))
    assert not routing.saves_input_alone(layer, x)


def _nothing_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_again.MadeAgain, "_is_proved", lambda *args: False)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v3", "glm4-moe", "granite-moe"])
def test_bits_are_those_of_a_layer_that_keeps_what_it_saves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention draws masks, which the attention half's result is made again with."""
    model = build(name, attention_dropout=0.4)
    found = []
    for kept in (False, True):
        if kept:
            _nothing_made_again(monkeypatch)
        ckptfused.convert(model, keep="mid" if kept else "inputs")
        torch.manual_seed(5)
        found.append((step(model)[1], torch.get_rng_state()))
    (again, after), (expected, state) = found
    assert torch.equal(after, state)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_what_was_saved_and_changed_in_place_raises() -> None:
    model = build("qwen3-moe", num_hidden_layers=1)
    ckptfused.convert(model)
    normed: list[Tensor] = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *args: normed.append(args[2]))
    ids = torch.arange(9)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    normed[0].detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _TimesWeight(torch.autograd.Function):
    """x times a weight and the number that it carries; backward reads both from what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight * weight.scale  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return dy * weight * getattr(weight, "scale", 1.0), None


class _ScaledNorm(nn.Module):
    def __init__(self, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight: Any = kind(torch.ones(32), False)
        self.weight.scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach().sum()
        return x + nn.functional.rms_norm(_TimesWeight.apply(x, self.weight), (32,))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.Parameter, type("Own", (nn.Parameter,), {})])
def test_a_weight_of_which_an_alias_was_made_is_saved_as_itself(kind: type[nn.Parameter]) -> None:
    found = []
    for converted in (False, True):
        model = build("mixtral", num_hidden_layers=1)
        model.model.layers[0].post_attention_layernorm = _ScaledNorm(kind)
        if converted:
            ckptfused.convert(model)
        found.append(step(model)[1])
    assert_alike(*found)


def _grads(loss: Tensor, weights: list[nn.Parameter], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, weights, **options)


@pytest.mark.parametrize("twice", [False, True], ids=["again", "differentiated"])
def test_a_graph_that_is_retained(twice: bool) -> None:
    results = []
    for converted in (False, True):
        model = build("qwen3-moe", num_hidden_layers=1, attn_implementation="eager").double()
        if converted:
            ckptfused.convert(model)
        ids, weights = torch.arange(9)[None], [*model.parameters()]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        first = _grads(loss, weights, create_graph=twice, retain_graph=True)
        if twice:
            loss = sum((g.square().sum() for g in first), torch.zeros(()))
        second = _grads(loss, weights)
        assert twice or all(map(torch.equal, first, second))
        results.append(dict(enumerate(second)))
    assert_alike(*results)


def test_within_a_checkpoint_of_ones_own_a_layer_is_replayed_once() -> None:
    model = build("qwen3-moe", num_hidden_layers=1)
    ckptfused.convert(model)
    layer = model.model.layers[0]
    x = torch.randn(1, 9, 32, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(9)[None])
    with CountOps() as ops:
        y = checkpoint(lambda x: layer(x * 1, position_embeddings=tables), x, use_reentrant=False)
        y.sum().backward()
    assert ops.calls["ckptfused.attention_block_fwd"] == 2
