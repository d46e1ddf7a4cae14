"""Layers of which more than two halves stay their own, or whose arguments nobody can follow."""

from __future__ import annotations

import copy
import enum
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.compat.transformers import key_sharing
from ckptfused.models.derive.derive import derive
from tests.models.compare import close
from tests.models.derive.tails import NORMED_V, TAILED
from tests.models.derive.test_mutants import check, in_double
from tests.models.derive.written import arguments, made
from tests.models.small import unfused

transformers = pytest.importorskip("transformers")


def test_the_norm_of_v_is_read() -> None:
    layer, args = made(in_double(NORMED_V)).double(), arguments(NORMED_V, tokens=13, dtype=torch.float64)
    found = derive(layer, args, {})
    assert found.proof is not None and found.here.rest is None, found.why
    assert {"attn.v_norm=rmsnorm", "attn.v_eps=1e-06"} <= set(found.proof.text.split())
    assert check(layer, args)


@pytest.mark.parametrize("way", ["h *= self.factor", "h = h * self.factor", "h.mul_(self.factor)"])
def test_a_factor_of_all_is_no_step(way: str) -> None:
    """Nothing of it is kept, and the block is one op."""
    source = in_double(TAILED.replace("h *= self.factor", way))
    layer, args = made(source).double(), arguments(TAILED, tokens=13, dtype=torch.float64)
    found = derive(layer, args, {})
    assert found.proof is not None and found.proof.text.startswith("halves=attn+ffn "), found.why
    assert found.here.rest is not None and found.here.rest.scales
    assert check(layer, args)
    layers = nn.ModuleList([layer])
    ckptfused.convert(layers)
    x = args[0].requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), unfused() as reasons:
        y = layers[0](x, *args[1:])
    assert not reasons
    assert {t.untyped_storage().data_ptr() for t in kept if t.shape == x.shape} == {x.untyped_storage().data_ptr()}
    with torch.no_grad():
        layer.factor.fill_(0.25)
    torch.testing.assert_close(layers[0](x, *args[1:]) * 3, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("factor", ["self.norm2.weight", "self.scale"])
def test_a_factor_that_is_trained_gets_its_gradient(factor: str) -> None:
    source = in_double(TAILED.replace("h *= self.factor", f"h = h * {factor}"))
    source = source.replace(
        "self.drop = nn.Dropout(p)", "self.drop, self.scale = nn.Dropout(p), nn.Parameter(torch.ones(1))"
    )
    layer, args = made(source).double(), arguments(TAILED, tokens=13, dtype=torch.float64)
    assert check(layer, args) == (factor == "self.scale")  # a module's weight is not read past it
    found = derive(layer, args, {})
    assert (found.proof is not None) == (factor == "self.scale")
    assert found.here.rest is None or not found.here.rest.scales


def test_a_norm_of_v_with_weights_is_said() -> None:
    source = in_double(NORMED_V.replace("v = F.rms_norm(v, (self.dim,), eps=1e-6)", "v = self.k_norm(v)"))
    found = derive(made(source).double(), arguments(NORMED_V, tokens=13, dtype=torch.float64), {})
    assert "v has a norm with weights" in found.why
    assert found.proof is None or not found.proof.text.startswith("halves=attn")


class Told(nn.Module):
    """A block that is called with a dictionary by which layers share keys."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.does = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24), does

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        y = x + self.down(torch.relu(self.up(self.norm(x))))
        if self.does == "nothing":
            return y
        if self.does == "asks":
            return y if isinstance(notes, UserDict) and notes is not None else 2 * y
        if self.does == "reads":
            return y * notes["factor"]
        if self.does == "looks for":
            return 2 * y if "factor" in notes else y
        if self.does == "asks whether":
            return 2 * y if notes else y
        notes["y"] = y
        return y


@pytest.mark.parametrize("does", ["nothing", "asks", "reads", "looks for", "asks whether", "writes"])
def test_an_argument_that_is_only_handed_on(does: str) -> None:
    if (kind := key_sharing()) is None:
        pytest.skip("transformers has no such dictionary")
    plain = nn.ModuleList([Told(does)]).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    notes = [kind(factor=3.0), kind(factor=3.0)]
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    with unfused() as reasons:
        for _ in range(2):
            made, want = (m[0](x, note) for m, note in zip((converted, plain), notes, strict=True))
            torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)
    assert notes[0].keys() == notes[1].keys()
    assert (not reasons) == (does in ("nothing", "asks")), reasons
    if reasons:
        assert "KVSharingDict is looked into" in str(reasons[0])


class Way(enum.Enum):
    """How a layer is called."""

    ONE = 1
    TWO = 2


@pytest.mark.parametrize("notes", [Way.TWO, UserDict(factor=3.0), object()], ids=["enum", "dictionary", "object"])
def test_other_objects_are_nothing_that_can_be_read(notes: Any) -> None:
    plain = nn.ModuleList([Told("nothing")]).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    with unfused() as reasons:
        torch.testing.assert_close(converted[0](x, notes), plain[0](x, notes), rtol=1e-12, atol=1e-12)
    assert f"an argument of type {type(notes).__name__}" in str(reasons)


WRITTEN: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "h *= self.factor": (torch.bfloat16, torch.float32),
    "h += self.factor": (torch.float32, torch.float64),
    "h.mul_(self.factor)": (torch.float32, torch.float64),
    "h = h.sin().clamp_(min=self.factor)": (torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_written_in_place_keeps_its_type(way: str) -> None:
    """The factor has a wider one (a layer's own in float32 beside weights in bfloat16)."""
    dtype, wider = WRITTEN[way]
    plain = nn.ModuleList([made(TAILED.replace("h *= self.factor", way).replace(".float()", ".double()"))]).to(dtype)
    plain[0].factor = plain[0].factor.to(wider)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    args = arguments(TAILED, tokens=13, dtype=dtype)
    with unfused() as reasons:
        got, want = (model[0](*args) for model in (converted, plain))
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert not reasons, reasons


@pytest.mark.parametrize(
    ("way", "kept"),
    [("h *= self.factor", 1), ("h = h * h * h", 2), ("h = h * self.free", 2), ("h = self.factor * h", 1)],
)
def test_of_a_factor_that_needs_more_the_rest_is_a_step(way: str, kept: int) -> None:
    """x, and what comes in where it is checkpointed: never a value within it."""
    source = in_double(TAILED.replace("h *= self.factor", way))
    source = source.replace("self.drop =", "self.free = torch.ones(1).requires_grad_(); self.drop =")
    layers = nn.ModuleList([made(source).double()])
    ckptfused.convert(layers)
    args = arguments(TAILED, tokens=13, dtype=torch.float64)
    x, seen = args[0].requires_grad_(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), unfused() as reasons:
        layers[0](x, *args[1:])
    assert not reasons, reasons
    assert len({t.untyped_storage().data_ptr() for t in seen if t.shape == x.shape}) <= kept


GEMMA_4: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": ({}, ["fused"] * 4),
    "inputs by layer": ({"hidden_size_per_layer_input": 8}, ["part"] * 4),
    "one mixture beside a dense one": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        ["part"] * 4,
    ),
    "shared keys": (
        {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "num_hidden_layers": 6},
        ["part"] * 3 + ["generic"] * 3,
    ),
}


@pytest.mark.parametrize("kind", GEMMA_4)
def test_gemma_4_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("transformers has no such model")
    options, paths = GEMMA_4[kind]
    layers = 6 if kind == "shared keys" else 4
    sizes: dict[str, Any] = {
        "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 64, "intermediate_size": 112,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.Gemma4TextConfig(**{**sizes, **options})
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # its norms are float32: all else would be their rounding
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    plain = transformers.Gemma4ForCausalLM(config).double().train()
    for name, t in plain.named_buffers():
        if name.endswith("layer_scalar"):
            t.fill_(0.7)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    ids = torch.randint(1, 96, (2, 16))
    with unfused() as reasons:
        losses = [model(ids, labels=ids, use_cache=False).loss for model in (converted, plain)]
    assert len(reasons) == paths.count("generic"), reasons
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (converted, plain)]
    close(*gradients, 1e-9)
    if kind in ("dense", "one mixture beside a dense one"):
        assert [layer.path for layer in ckptfused.convert(converted).layers] == paths
