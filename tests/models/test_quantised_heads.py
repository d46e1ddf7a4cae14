"""Heads whose weight is stored in few bits, under the chunked loss, and such models compiled as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

import ckptfused
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


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_after_an_evaluation(target: str, dtype: torch.dtype) -> None:
    """bitsandbytes packs a layer for inference for good, at its first evaluation on a processor with AVX512-BF16."""
    model = made(target, dtype).train()
    ckptfused.convert(model, loss="chunked")
    before = run(model, text_batch())
    head, told = model.get_output_embeddings(), []
    layer = getattr(head, "base_layer", head)
    handle = layer.register_forward_pre_hook(lambda module, args: told.append(module.training))
    with torch.no_grad():
        model.eval()(**text_batch(), use_cache=False)
        assert told == [True] and not layer.training
    handle.remove()
    model.train()
    with unfused() as reasons:
        after = run(model, text_batch())
    assert not reasons
    equal(after, before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_packed_head_raises_in_training(when: str) -> None:
    """Whichever mode the model was converted in."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    model = made(dtype=torch.bfloat16).eval()
    weight = model.get_output_embeddings().weight
    if when == "after":
        ckptfused.convert(model, loss="chunked")
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    if when == "before":
        ckptfused.convert(model, loss="chunked")
    with pytest.raises(RuntimeError, match="packed its 4-bit weight anew.*trains without gradients"):
        model.train()(**text_batch())


def test_a_step_compiles_as_a_whole() -> None:
    plain = made().train()
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    torch.compile(model, fullgraph=True, backend="aot_eager")(**text_batch()).loss.backward()
    plain(**text_batch()).loss.backward()
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() and found
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)
