"""Derived layers whose weights bitsandbytes stores in few bits: fused, with the gradients of the model as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

import ckptfused  # noqa: E402
from ckptfused.models.derive.family import DERIVED  # noqa: E402
from tests.models.compare import close, equal, no_worse, result, run  # noqa: E402
from tests.models.derive.test_transformers import IN_ONE_HALF_OF_A_HEAD, SIZES  # noqa: E402
from tests.models.small import unfused  # noqa: E402
from tests.models.zoo import randomize, text_batch  # noqa: E402
from tests.quantized import Way, quantize_linears  # noqa: E402

pytestmark = [
    pytest.mark.each_torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:MatMul8bitLt"),
]
OWN_SIZES: dict[str, Any] = {"vocab_size": 128}  # as `text_batch` has
DECODERS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 88, "word_embed_proj_dim": 48, "dropout": 0.0},
    "Olmo2": {},
    "Cohere": {},
    "StableLm": IN_ONE_HALF_OF_A_HEAD,
    "Starcoder2": {},
    "Glm4": IN_ONE_HALF_OF_A_HEAD,
    "Granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
}
FEW = ("GPTNeoX", "Glm4")
"""One with a joint q, k and v, head by head; one with a joint gate and up, and norms on both sides."""
NF4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4"}
NESTED: dict[str, Any] = {**NF4, "bnb_4bit_use_double_quant": True}
FP4: dict[str, Any] = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16}


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """Loads a small model as `from_pretrained` does in few bits."""

    def load(name: str, dtype: torch.dtype = torch.float32, bits: int = 4, **options: Any) -> Any:
        folder = tmp_path / name
        if not folder.exists():
            config = getattr(transformers, f"{name}Config")(**{**SIZES, **OWN_SIZES, **DECODERS[name]})
            plain = randomize(getattr(transformers, f"{name}ForCausalLM")(config))
            plain.save_pretrained(folder)
        of_4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, **options}
        stored = transformers.BitsAndBytesConfig(**of_4 if bits == 4 else {"load_in_8bit": True})
        cls = transformers.AutoModelForCausalLM
        return cls.from_pretrained(folder, quantization_config=stored, dtype=dtype)

    return load


def adapted(model: Any, p: float = 0.0) -> Any:
    """The model with LoRA on all its projections, whose numbers do not depend on what was drawn before."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": p}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).train()


def converted(model: Any, **options: Any) -> Any:
    """The model, all layers of which are derived and fused."""
    report = ckptfused.convert(model, **options)
    assert {(layer.family, layer.path) for layer in report.layers} == {(DERIVED.name, "fused")}, str(report)
    return model


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, loaded: Any) -> None:
    """QLoRA before convert, and after it."""
    want = run(adapted(loaded(name, **NESTED)), text_batch())
    for model in (adapted(converted(loaded(name, **NESTED))), converted(adapted(loaded(name, **NESTED)))):
        with unfused() as reasons:
            got = run(model, text_batch())
        assert not reasons
        close(got, want, 2e-5)
    assert sum("lora_B" in key for key in got) >= 2 * 4


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("bits", "options"), [(4, NF4), (4, FP4), (8, {})], ids=["nf4", "fp4", "int8"])
def test_ways(name: str, bits: int, options: dict[str, Any], loaded: Any) -> None:
    plain, model = (adapted(loaded(name, bits=bits, **options)) for _ in range(2))
    ckptfused.convert(model)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    # The norms on both sides of GLM-4's halves make four times as much of the rounding of int8's scales.
    close(got, run(plain, text_batch()), 4e-5)


@pytest.mark.parametrize("name", FEW)
def test_what_is_kept_does_not_change_bits(name: str, loaded: Any) -> None:
    found = []
    for keep in ("all", "inputs", "attention"):
        model = converted(adapted(loaded(name, torch.bfloat16, **NESTED), p=0.1), keep=keep)
        torch.manual_seed(5)
        found.append(run(model, text_batch()))
    for other in found[1:]:
        equal(other, found[0])


@pytest.mark.parametrize("name", FEW)
def test_the_same_numbers_have_the_same_bits(name: str, loaded: Any) -> None:
    """Dropout of adapters among them: a layer whose weights are the dequantized ones draws the same masks."""
    few = adapted(loaded(name, **NF4), p=0.3)
    plain = adapted(loaded(name, **NF4).dequantize(), p=0.3)
    found = []
    for model in (few, plain):
        torch.manual_seed(5)
        found.append(run(converted(model), text_batch()))
    close(*found, 1e-6)


@pytest.mark.parametrize("name", FEW)
def test_kbit_training_under_autocast(name: str, loaded: Any) -> None:
    """Trainer's way with bf16=True: norms and the residual stream in float32, products in bfloat16."""
    ready = peft.prepare_model_for_kbit_training
    plain, model = (adapted(ready(loaded(name, torch.bfloat16, **NF4), False)) for _ in range(2))
    ckptfused.convert(model)
    with torch.autocast("cpu", torch.bfloat16), unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    with torch.autocast("cpu", torch.bfloat16):
        own = run(plain, text_batch())
    no_worse([(got, own, run(plain.float(), text_batch()))], torch.bfloat16)


def test_another_compute_type_is_left_to_the_layer(loaded: Any) -> None:
    model = loaded("GPTNeoX", torch.bfloat16, **{**NF4, "bnb_4bit_compute_dtype": torch.float32})
    (layer, _) = ckptfused.convert(model).layers
    assert layer.path == "generic"
    assert layer.reason.endswith("load the model with bnb_4bit_compute_dtype=torch.bfloat16")


def test_a_weight_that_was_packed_for_inference_raises(loaded: Any) -> None:
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    model = converted(adapted(loaded("Glm4", torch.bfloat16, **NF4)))
    weight = model.base_model.model.model.layers[1].self_attn.o_proj.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    with pytest.raises(RuntimeError, match="packed its 4-bit weight anew.*trains without gradients"):
        model(**text_batch())


def test_a_state_that_is_replaced_before_backward_raises(loaded: Any) -> None:
    """From the next call on it counts."""
    plain, model = (adapted(loaded("GPTNeoX", **NF4)) for _ in range(2))
    converted(model)
    out = model(**text_batch())
    for each in (plain, model):
        for layer in each.base_model.model.gpt_neox.layers:
            state = layer.attention.query_key_value.weight.quant_state
            state.absmax = state.absmax * 2
    with pytest.raises(RuntimeError, match="its quantized weight, or the state of it, was replaced between"):
        out.loss.backward()
    close(run(model, text_batch()), run(plain, text_batch()), 2e-5)


def test_codes_that_are_written_before_backward_raise(loaded: Any) -> None:
    model = converted(adapted(loaded("GPTNeoX", **NF4)))
    out = model(**text_batch())
    with torch.no_grad():
        model.base_model.model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("name", FEW)
def test_a_plan_counts_codes_and_scratch(name: str, loaded: Any) -> None:
    """What a profile predicts is what is measured, a weight at a time in its scratch."""
    model = converted(adapted(loaded(name, **NESTED)))
    predicted, measured = ckptfused.profile(model, text_batch(), device="cpu"), ckptfused.profile(model, text_batch())
    assert predicted.peak == measured.peak
    assert ckptfused.doctor(model, text_batch()).certificate.startswith("Certificate")


class Block(nn.Module):
    """A block after nanoGPT. past: it takes the weight of its last layer for a product of its own."""

    def __init__(self, width: int = 64, heads: int = 4, past: bool = False) -> None:
        super().__init__()
        self.heads, self.past, self.ln_1, self.ln_2 = heads, past, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.fc, self.out, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.attn(self.ln_1(x)).chunk(3, -1))
        p = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).flatten(2)))
        h = F.gelu(self.fc(self.ln_2(x)))
        return x + self.drop(F.linear(h, self.out.weight, self.out.bias) if self.past else self.out(h))


@pytest.mark.parametrize("way", [Way("nf4"), Way("fp4", 128, True)], ids=str)
def test_own_block(way: Way) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    quantize_linears(plain, way)
    for p in plain.parameters():
        p.requires_grad_(p.dim() == 1)
    model = converted(copy.deepcopy(plain))
    x = torch.randn(2, 16, 64)
    with unfused() as reasons:
        found = result(model, x)
        close(result(model.eval(), x.requires_grad_()), result(plain.eval(), x), 1e-5)
    assert not reasons
    assert {"0.attn.bias", "0.ln_1.weight", "0.out.bias"} & found.keys() == {"0.ln_1.weight", "0.out.bias"}


def test_a_weight_that_is_used_past_its_adapter() -> None:
    """The layer's own code takes the weight alone, whatever PEFT puts around its module."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(past=True), Block(past=True)).eval()
    config = peft.LoraConfig(r=2, target_modules=["out", "fc"], init_lora_weights=False)
    plain = peft.get_peft_model(plain, config).eval()
    model = copy.deepcopy(plain)
    (layer, _) = ckptfused.convert(model).layers
    assert layer.reason.endswith("out.weight, with an adapter, is used past its module")
    x = torch.randn(2, 16, 64)
    close(result(model, x), result(plain, x), 1e-5)
