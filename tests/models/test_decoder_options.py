"""Decoder families and their options, caches and masks: fused where that is the same, else the layer's own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.layer.parts import Reason
from tests.models import zoo_decoders as zoo
from tests.models import zoo_llama
from tests.models.test_families import build, close, converted, run, without_zero
from tests.models.versions import since, transformers
from tests.models.zoo import ZOO, Specimen, randomize, text_batch

DECODERS = [pytest.param(ZOO[n], id=n) for n in ("gemma2", "gemma3", "phi3", "gpt2", "neox", "opt")]


REFUSED = {
    "gpt2-reorder": (zoo.gpt2(reorder_and_upcast_attn=True), "eager", "reorder_and_upcast_attn"),
    "gpt2-cross": (zoo.gpt2(add_cross_attention=True), "sdpa", "cross-attention"),
    "gpt2-activation": (zoo.gpt2(activation_function="gelu_fast"), "sdpa", "no kernel"),
    "gemma2-activation": (zoo.gemma2(hidden_activation="gelu_fast"), "eager", "no kernel"),
    "gemma3-activation": (zoo.gemma3(hidden_activation="gelu_fast"), "sdpa", "no kernel"),
    "phi3-activation": (zoo.phi3(hidden_act="mish"), "sdpa", "no kernel"),
}


def of_its_family(name: str) -> Any:
    family = name.partition("-")[0]
    return pytest.param(name, marks=since(ZOO[family].since, f"{family} is fused"))


@pytest.mark.parametrize("name", [of_its_family(name) for name in REFUSED])
def test_refused(name: str, reasons: list[Reason], underived: None) -> None:
    make, implementation, why = REFUSED[name]
    model = randomize(make(0.0, implementation)).train()
    other = copy.deepcopy(model)
    report = ckptfused.convert(other)
    assert [x.path for x in report.layers] == ["generic"] * 2
    assert all(why in x.reason for x in report.layers)
    batch = text_batch()
    if name == "gpt2-cross":
        batch["encoder_hidden_states"] = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(0))
    got, want = run(other, batch), run(model, batch)  # with a cache, as use_cache is on by default
    assert len(reasons) == 2 and all(why in reason.text for reason in reasons)
    close(got, want, 1e-5)


@pytest.mark.parametrize(
    ("name", "make", "implementation", "becomes"),
    [
        ("neox", zoo.neox(hidden_act="tanh"), "sdpa", "generic"),
        ("opt", zoo.opt(activation_function="tanh"), "sdpa", "part"),
        ("opt sigmoid", zoo.opt(activation_function="sigmoid"), "sdpa", "fused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_activations_of_derived_layers(
    name: str, make: zoo.Make, implementation: str, becomes: str, reasons: list[Reason]
) -> None:
    """One is known by what it computes; where there is no kernel for it, the attention half is fused alone."""
    model = randomize(make(0.0, implementation)).train()
    other = copy.deepcopy(model)
    assert [x.path for x in ckptfused.convert(other).layers] == [becomes] * 2
    got, want = (without_zero(run(m, text_batch()), ZOO[name.split()[0]], 1e-5) for m in (other, model))
    close(got, want, 1e-5)
    assert len(reasons) == 2 * (becomes == "generic")


def test_reordered_attention_is_fused_where_sdpa_runs() -> None:
    """GPT-2 reorders in eager attention only."""
    model = randomize(zoo.gpt2(reorder_and_upcast_attn=True)(0.0, "sdpa")).train()
    close(run(converted(model, ZOO["gpt2"]), text_batch()), run(model, text_batch()), 1e-5)


@pytest.mark.parametrize("name", [of_its_family("gpt2"), of_its_family("gemma2")])
def test_quick_gelu_is_fused(name: str, reasons: list[Reason]) -> None:
    """Plain as in CLIP, and as a gate."""
    makers = {"gpt2": zoo.gpt2(activation_function="quick_gelu"), "gemma2": zoo.gemma2(hidden_activation="quick_gelu")}
    model = randomize(makers[name](0.0, "eager")).train()
    close(run(converted(model, ZOO[name]), text_batch()), run(model, text_batch()), 1e-5)
    assert not reasons


@since((5, 21), "SDPA refuses a soft-cap; before, it takes no notice of one")
def test_soft_cap_in_sdpa_is_refused_as_it_was() -> None:
    model = build(ZOO["gemma2"], 0.0, "eager")
    ckptfused.convert(model)
    model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="softcap"):
        run(model, text_batch())


@pytest.mark.skipif(transformers() >= (5, 21), reason="from transformers 5.21 SDPA refuses a soft-cap")
def test_soft_cap_in_sdpa_is_ignored_as_it_was(reasons: list[Reason]) -> None:
    model = build(ZOO["gemma2"], 0.0, "eager")
    other = converted(model, ZOO["gemma2"])
    for one in (model, other):
        one.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    close(run(other, text_batch()), run(model, text_batch()), 1e-5)
    assert len(reasons) == 2


def test_soft_cap_given_in_the_call(reasons: list[Reason]) -> None:
    """Keyword arguments reach the attention function: Gemma 3's eager one would take a cap there."""
    model = build(ZOO["gemma3"], 0.0, "eager")
    other = converted(model, ZOO["gemma3"])
    batch: Any = {**text_batch(), "softcap": 2.0}
    close(run(other, batch), run(model, batch), 1e-5)
    assert len(reasons) == 2


@pytest.mark.parametrize(
    ("name", "path", "becomes"),
    [
        ("gpt2", "attn.resid_dropout", "part"),  # derived: the half without it is one still
        ("phi3", "resid_mlp_dropout", "part"),
        ("neox", "post_mlp_dropout", "generic"),
    ],
)
def test_another_module_in_place_of_dropout(name: str, path: str, becomes: str, reasons: list[Reason]) -> None:
    model = build(ZOO[name], 0.0, "sdpa")
    layer = ZOO[name].layers(model)[1]
    parent, _, child = path.rpartition(".")
    setattr(layer.get_submodule(parent), child, nn.Hardtanh(-0.1, 0.1))
    other = copy.deepcopy(model)
    assert [x.path for x in ckptfused.convert(other).layers] == ["fused", becomes]
    close(run(other, text_batch()), run(model, text_batch()), 1e-5)
    assert len(reasons) == (becomes == "generic")


@pytest.mark.parametrize("specimen", DECODERS)
def test_generation_with_a_cache(specimen: Specimen, reasons: list[Reason]) -> None:
    model = build(specimen, 0.0, "eager").eval()
    other: Any = converted(model, specimen)
    batch = text_batch(left=True)
    batch.pop("labels")
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**batch, **settings)  # type: ignore[operator]
    torch.testing.assert_close(other.generate(**batch, **settings), want, rtol=0, atol=0)
    assert reasons and all(reason.original for reason in reasons)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(zoo.gpt2(), id="fused"),
        pytest.param(zoo.gpt2(add_cross_attention=True), id="generic-by-position"),
        pytest.param(zoo.neox(hidden_act="tanh"), id="generic-by-name"),
    ],
)
def test_eval_fills_its_cache(make: zoo.Make) -> None:
    """The cache is filled with gradients too, fused or not: the caller may go on from it."""
    model: Any = randomize(make(0.0, "sdpa")).eval()
    other = copy.deepcopy(model)
    ckptfused.convert(other)
    batch = text_batch()
    got, want = (m(**batch, use_cache=True) for m in (other, model))
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length() == 19
    close({"loss": got.loss.detach()}, {"loss": want.loss.detach()}, 1e-6)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "gemma3-bidirectional", "phi3-partial-window", "opt"])
def test_masks_of_flash_attention(name: str, reasons: list[Reason]) -> None:
    """Flash attention gets the padding and the window; the fused layers, which do not call it, compute the same."""
    specimen = ZOO[name]
    model = build(specimen, 0.0, "sdpa")
    other: Any = converted(model, specimen)
    other.config._attn_implementation = "flash_attention_2"
    for batch in (text_batch(), {k: v for k, v in text_batch().items() if k != "attention_mask"}):
        got, want = (without_zero(run(m, batch), specimen, 1e-5) for m in (other, model))
        close(got, want, 1e-5)
    assert not reasons


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["mistral-window", "neox"])
def test_layer_called_without_a_mask(name: str, implementation: str, reasons: list[Reason]) -> None:
    """Eager attention then hides nothing, SDPA what comes later; the window is in the mask alone."""
    specimen = ZOO[name]
    model = build(specimen, 0.0, implementation)
    layer = specimen.layers(model)[0]
    other = specimen.layers(converted(model, specimen))[0]
    half = 8 if name == "mistral-window" else 2
    tables = torch.randn(2, 1, 19, half, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 1, 2).unbind()
    x = torch.randn(3, 19, 48, generator=torch.Generator().manual_seed(1))
    got, want = (m(x, position_embeddings=tables, attention_mask=None) for m in (other, layer))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not reasons


# Dynamo looks at the gradient of every tensor that enters a graph.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.extended), "gpt2"])
def test_layer_compiled_by_itself(name: str, reasons: list[Reason]) -> None:
    torch._dynamo.reset()
    model = build(ZOO[name], 0.0, "eager")
    other = converted(model, ZOO[name])
    for layer in ZOO[name].layers(other):
        layer.compile(fullgraph=True, backend="aot_eager")
    batch: Any = {**text_batch(), "use_cache": False}
    close(run(other, batch), run(model, batch), 1e-5)
    assert not reasons


@pytest.mark.slow
@pytest.mark.each_torch
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_attention_weights_of_layers_compiled_by_themselves() -> None:
    """Asked for after a call that was fused."""
    torch._dynamo.reset()
    model: Any = build(ZOO["opt"], 0.0, "eager")
    other: Any = converted(model, ZOO["opt"])
    for layer in ZOO["opt"].layers(other):
        layer.compile(backend="aot_eager")
    batch: Any = {**text_batch(), "use_cache": False}
    run(other, batch)
    found, expected = (m(**batch, output_attentions=True).attentions for m in (other, model))
    assert len(expected) == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tables_that_need_a_gradient(reasons: list[Reason]) -> None:
    model = build(ZOO["llama"], 0.0, "sdpa")
    layer, other = (zoo_llama.decoder_layers(m)[0] for m in (model, converted(model, ZOO["llama"])))
    x = torch.randn(3, 19, 48, generator=torch.Generator().manual_seed(1))
    found = []
    for m in (other, layer):
        tables = [torch.full((1, 19, 12), 0.5, requires_grad=True) for _ in range(2)]
        m(x, position_embeddings=tables).square().sum().backward()
        found.append({str(i): t.grad for i, t in enumerate(tables) if t.grad is not None})
    close(found[0], found[1], 1e-5)
    assert len(reasons) == 1
