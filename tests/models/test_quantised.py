"""Quantised projections: layers run as they are, checkpointed; adapters beside them get their gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import ckptfused
from tests.models.compare import close, run
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch

pytestmark = pytest.mark.each_torch


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:MatMul8bitLt")
@pytest.mark.parametrize("first", [True, False], ids=["convert-adapt", "adapt-convert"])
@pytest.mark.parametrize(("bits", "name"), [(4, "Linear4bit"), (8, "Linear8bitLt")])
def test_bitsandbytes(bits: int, name: str, first: bool, tmp_path: Path) -> None:
    """QLoRA."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    options: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    options = {"load_in_4bit": True, **options} if bits == 4 else {"load_in_8bit": True}

    def make(convert: bool) -> Any:
        quantised = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=transformers.BitsAndBytesConfig(**options), dtype=torch.float32
        )
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        for what in ("convert", "adapt") if first else ("adapt", "convert"):
            if what == "adapt":
                adapted = peft.get_peft_model(quantised, config).train()
            elif convert:
                report = ckptfused.convert(quantised)
                assert {layer.path for layer in report.layers} == {"generic"}
                assert all(name in layer.reason for layer in report.layers), str(report)
        return adapted

    plain, model = make(False), make(True)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert len(reasons) == 2 and all(name in reason.text for reason in reasons)
    close(got, run(plain, text_batch()), 1e-5)
    assert sum("lora" in key for key in got) == 2 * 2 * 2


class Stored(nn.Module):
    """A projection of an unknown kind, kept in bytes, which takes what it finds in `weight` for its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.shape = linear.weight.shape
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8).view(-1, 1), False)
        self.taken: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.taken is None:
            self.taken = self.weight.detach()
        return nn.functional.linear(x, self.taken.view(self.shape) * self.scale)


def test_weights_in_bytes() -> None:
    """Neither their type nor their shape says how wide the layer is, and to count bytes their forward is not called."""
    plain: Any = llama()
    for name in ("q_proj", "o_proj"):
        setattr(plain.model.layers[0].self_attn, name, Stored(getattr(plain.model.layers[0].self_attn, name)))
    for name in ("gate_proj", "down_proj"):
        setattr(plain.model.layers[0].mlp, name, Stored(getattr(plain.model.layers[0].mlp, name)))
    model = copy.deepcopy(plain)
    report = ckptfused.convert(model)
    assert [layer.path for layer in report.layers] == ["generic", "fused"]
    assert report.layers[0].reason == (
        f"q: {Stored.__module__}.Stored is quantised and runs a kernel of its own: the layer is checkpointed as it is"
    )
    assert report.layers[0].after == 48 * 4
    assert model.model.layers[0].mlp.down_proj.taken is None
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
