"""Heads whose weight is stored in few bits, under the chunked loss, and such models compiled as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

import bitsandbytes

import ckptfused
from ckptfused.compat.quantizers import four_bit_layers, repacked
from ckptfused.layer.quantized import stored_weight
from tests.models.compare import equal, gradients, run
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch
from tests.quantized import Way, quantize_linears

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def made(target: str = "q_proj", dtype: torch.dtype = torch.float32) -> Any:
    """A small Llama all of whose linear layers are in 4 bits, with adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = llama(hidden_size=64, intermediate_size=128, vocab_size=128).to(dtype)
    quantize_linears(model, Way("nf4"), dtype, head=True)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", target], init_lora_weights=False))


def may_be_packed(model: Any) -> list[Any]:
    """The 4-bit layers of a model, which pack themselves in an evaluation, whatever processor this is."""
    layers = four_bit_layers(model)
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    return layers


def packed(model: Any) -> list[str]:
    """The layers whose weights were packed for inference."""
    return [name for name, module in model.named_modules() if repacked(getattr(module, "quant_state", None))]


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [None, "chunked"])
@pytest.mark.parametrize("cached", [False, True])
def test_training_goes_on_after_an_evaluation(target: str, dtype: torch.dtype, loss: Any, cached: bool) -> None:
    """Without `convert` bitsandbytes packs a layer at its first evaluation, and it trains without gradients then."""
    model = made(target, dtype).train()
    layers = may_be_packed(model)
    ckptfused.convert(model, loss=loss)
    before = run(model, text_batch())
    with torch.no_grad():
        model.eval()(**text_batch(), use_cache=cached)
        with ckptfused.original(model):
            model(**text_batch())
    assert len(layers) == 15 and not packed(model)
    model.train()
    with unfused() as reasons:
        after = run(model, text_batch())
    assert not reasons
    equal(after, before)
    ckptfused.revert(model)
    assert all(layer.support_avx512bf16_for_cpu is True for layer in layers)


def pack(layer: Any) -> None:
    """What `Linear4bit.forward` does with its weight in an evaluation on such a processor."""
    layer.weight.data, layer.weight.quant_state = bitsandbytes.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )


@pytest.mark.parametrize(("when", "loss"), [("before", None), ("before", "chunked"), ("after", "chunked")])
def test_a_packed_head_raises_in_training(when: str, loss: Any) -> None:
    """Whichever mode the model was converted in, and whether its head is fused or bitsandbytes' own."""
    model = made(dtype=torch.bfloat16).eval()
    if when == "after":
        ckptfused.convert(model, loss=loss)
    pack(model.get_output_embeddings())
    if when == "before":
        ckptfused.convert(model, loss=loss)
    for train in (True, False) if when == "before" else (True,):
        with pytest.raises(RuntimeError, match="packed its 4-bit weight anew.*trains without gradients"):
            model.train(train)(**text_batch())


def test_a_packed_layer_raises_where_it_is_not_fused() -> None:
    """Here since somebody has a hook on it; nothing is left on a model that is reverted."""
    model = made(dtype=torch.bfloat16)
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, args: None)
    pack(layer)
    for _ in range(2):  # converted anew it has the hook once
        ckptfused.convert(model)
    assert len(layer._forward_pre_hooks) == 2
    with pytest.raises(RuntimeError, match="packed its 4-bit weight anew"):
        model.train()(**text_batch())
    ckptfused.revert(model)
    assert len(layer._forward_pre_hooks) == 1


def test_what_is_unpacked_again_trains() -> None:
    """Saving does so."""
    model = made(dtype=torch.bfloat16).eval()
    pack(model.get_output_embeddings())
    ckptfused.convert(model)
    model.state_dict()
    assert not packed(model)
    model.train()(**text_batch()).loss.backward()
    assert gradients(model)


def test_a_conversion_that_fails_leaves_errors_in_place() -> None:
    model = made(dtype=torch.bfloat16).eval()
    pack(model.get_output_embeddings())
    ckptfused.convert(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="packed its 4-bit weight anew"):
            ckptfused.convert(model.train(), loss="chunked")
        with pytest.raises(RuntimeError, match="packed its 4-bit weight anew"):
            model(**text_batch())


MEMORY: dict[str, Callable[[Any], None]] = {
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "packed": lambda layer: pack(layer),
}
REPLACED: dict[str, Callable[[Any], None]] = {
    "scales": lambda layer: setattr(layer.weight.quant_state, "absmax", layer.weight.quant_state.absmax.clone()),
    "a weight": lambda layer: setattr(layer, "weight", copy.deepcopy(layer.weight)),
}


def after(change: Callable[[Any], None], create_graph: bool) -> dict[str, torch.Tensor]:
    """The gradients of a step, before whose backward a head is changed."""
    model = made("lm_head").train()
    ckptfused.convert(model, loss="chunked")
    loss = model(**text_batch()).loss
    change(model.get_output_embeddings().base_layer)
    loss.backward(create_graph=create_graph)
    return gradients(model)


@pytest.mark.parametrize("change", REPLACED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_head_that_is_replaced_before_backward_raises(change: str, create_graph: bool) -> None:
    with pytest.raises(RuntimeError, match="was replaced between forward and backward"):
        after(REPLACED[change], create_graph)


@pytest.mark.parametrize("change", MEMORY)
def test_other_memory_of_a_head(change: str) -> None:
    """The gradients are there with the loss, and need no weight any more; the graph of a backward does."""
    equal(after(MEMORY[change], False), after(lambda layer: None, False))
    with pytest.raises(RuntimeError, match="got other memory since forward|packed its 4-bit weight anew"):
        after(MEMORY[change], True)


def test_it_is_chunked_under_the_autocast_of_a_trainer() -> None:
    """After `prepare_model_for_kbit_training`, converted outside of autocast: looked at in each call, as layers are."""
    peft = pytest.importorskip("peft")
    model = llama(hidden_size=64, intermediate_size=128, vocab_size=128).to(torch.bfloat16)
    quantize_linears(model, Way("nf4"), torch.bfloat16, head=True)
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        if "norm" in name or "embed" in name:
            p.data = p.data.float()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).train()
    report = ckptfused.convert(model, loss="chunked")
    assert report.heads[0].path == "original" and "bnb_4bit_compute_dtype" in report.heads[0].reason
    with torch.autocast("cpu", torch.bfloat16), unfused() as reasons:
        assert model(**text_batch()).logits is None
    assert not reasons


def test_a_conversion_that_fails_leaves_layers_as_they_were() -> None:
    model = made()
    layers = may_be_packed(model)
    with pytest.raises(ValueError, match="keep"):
        ckptfused.convert(model, keep={"no layer": "all"})
    assert all(layer.support_avx512bf16_for_cpu is True for layer in layers)


def test_a_head_in_8_bits_that_is_converted_in_evaluation() -> None:
    """There it computes in int8; in training its loss is chunked."""
    model = llama(hidden_size=64, vocab_size=128)
    head = bitsandbytes.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head.to("cpu")
    ckptfused.convert(model.eval(), loss="chunked")
    assert model.train()(**text_batch()).logits is None


@pytest.mark.parametrize("loss", [None, "chunked"])
def test_a_step_compiles_as_a_whole(loss: Any) -> None:
    plain = made("lm_head").train()
    model = copy.deepcopy(plain)
    ckptfused.convert(model, loss=loss)
    torch.compile(model, fullgraph=True, backend="aot_eager")(**text_batch()).loss.backward()
    plain(**text_batch()).loss.backward()
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() and found
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)


def test_8_bits_without_scales_raise() -> None:
    model = llama(hidden_size=64, vocab_size=128)
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer.load_state_dict(model.model.layers[0].self_attn.o_proj.state_dict())
    model.model.layers[0].self_attn.o_proj = layer.to("cpu")
    layer.weight.SCB = None
    with pytest.raises(RuntimeError, match="int8 without the scales that belong to it"):
        ckptfused.convert(model.train())


@pytest.mark.parametrize("place", [0, -1], ids=["layer", "head"])
def test_4_bits_without_a_state_raise(place: int) -> None:
    model = made().train()
    layer = four_bit_layers(model)[place]
    layer.weight.quant_state = layer.quant_state = None
    with pytest.raises(RuntimeError, match="4 bits without the state that belongs to it"):
        ckptfused.convert(model, loss="chunked")(**text_batch())


def test_a_weight_of_another_shape_is_not_quantized_yet() -> None:
    layer = bitsandbytes.nn.Linear4bit(64, 32, bias=False)
    layer.weight = bitsandbytes.nn.Params4bit(torch.randn(40, 64), requires_grad=False)
    assert "not quantized yet" in str(stored_weight(layer, torch.float32, "q"))


def test_evaluations_of_a_compiled_model_break_no_graph() -> None:
    model = made("lm_head").train()
    ckptfused.convert(model, loss="chunked")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled.eval()
    with torch.no_grad():
        compiled(**text_batch(), use_cache=False)
    compiled.train()(**text_batch()).loss.backward()
    assert gradients(model)
