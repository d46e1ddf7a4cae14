"""TRL's trainers on models whose layers and loss are converted, and what they refuse that `convert` takes.

TRL and datasets are no part of the test group: skipped without them. Shown with trl 1.16.0, datasets 5.2.0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
import peft
import tokenizers
import trl
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ckptfused
from tests.models.compare import close, run
from tests.models.small import llama, unfused
from tests.models.test_loss_head import chunked, is_chunked
from tests.models.test_trainer import assert_curves_agree
from tests.models.zoo import VOCABULARY, ZOO, randomize, text_batch
from tests.quantized import Way, quantize_linears

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that are numbers; the collator asks it for the id that pads."""
    words = {str(i): i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="1", eos_token="2", unk_token="0")


def texts() -> Any:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (5 + i % 7,), generator=draw).tolist() for i in range(24)]
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="texts")


def preferences() -> Any:
    """Prompts, each with an answer that is preferred to another."""
    rows = [" ".join(map(str, row)) for row in texts()["input_ids"]]
    answers = {"chosen": rows[1:] + rows[:1], "rejected": rows[2:] + rows[:2]}
    table = {"prompt": rows} | {name: [f" {t}" for t in of] for name, of in answers.items()}
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(table), fingerprint="preferences")


COMMON: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False, "bf16": False,
}  # fmt: skip


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    arguments = trl.SFTConfig(str(folder), dataset_kwargs={"skip_prepare_dataset": True}, **COMMON | options)
    return trl.SFTTrainer(model, arguments, train_dataset=texts(), processing_class=tokenizer())


def preferring(model: Any, folder: Path, **options: Any) -> Any:
    """What learns preferences beside the model without its adapters."""
    arguments = trl.DPOConfig(str(folder), **COMMON | options)
    return trl.DPOTrainer(model, args=arguments, train_dataset=preferences(), processing_class=tokenizer())


def agrees(plain: Any, path: str, make: Callable[[Any, Path], Any], folder: Path) -> None:
    """Trains a model as it is and a converted copy, all of whose layers have this path."""
    ours = copy.deepcopy(plain)
    report = ckptfused.convert(ours)
    assert {layer.path for layer in report.layers} == {path}, str(report)
    assert_curves_agree(losses(make(ours, folder / "ours")), losses(make(plain, folder / "plain")))


def losses(made: Any) -> list[float]:
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_the_plain_model(accumulation: int, tmp_path: Path) -> None:
    plain = llama()
    options = {"gradient_accumulation_steps": accumulation}
    ours = losses(trainer(chunked(plain), tmp_path / "ours", **options))
    assert_curves_agree(ours, losses(trainer(plain, tmp_path / "plain", **options)))


@pytest.mark.parametrize("make", [trainer, preferring], ids=["SFT", "DPO"])
def test_adapters_on_weights_in_4_bits(make: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    """QLoRA. Without dropout: a fused layer's masks are its own."""
    pytest.importorskip("bitsandbytes")
    base = llama()
    quantize_linears(base, Way("nf4", 64, True), torch.float32)
    for p in base.parameters():
        p.requires_grad_(False)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
    agrees(peft.get_peft_model(base, config).train(), "fused", make, tmp_path)


@pytest.mark.parametrize("make", [trainer, preferring], ids=["SFT", "DPO"])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_loaded_in_4_bits(make: Callable[[Any, Path], Any], prepared: bool, tmp_path: Path) -> None:
    """QLoRA as it is loaded: PEFT's layers are those of bitsandbytes then, and TRL casts adapters to bfloat16, to whose
    rounding the losses agree."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "base")
    how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    stored = BitsAndBytesConfig(load_in_4bit=True, **how)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=stored, dtype=torch.bfloat16)
    if prepared:
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"])
    plain = peft.get_peft_model(base, config).train()
    assert isinstance(plain.model.model.layers[0].mlp.down_proj, peft.tuners.lora.Linear4bit)
    ours = copy.deepcopy(plain)
    ckptfused.convert(ours)
    with unfused() as reasons:
        found = losses(make(ours, tmp_path / "ours", bf16=True))
    assert not reasons and {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.bfloat16}
    assert found == pytest.approx(losses(make(plain, tmp_path / "plain", bf16=True)), rel=2**-7)


@pytest.mark.parametrize("make", [trainer, preferring], ids=["SFT", "DPO"])
def test_adapters_on_experts(make: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    """PEFT's `target_parameters`, beside an attention half that is fused."""
    config = peft.LoraConfig(
        r=4,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = randomize(ZOO["qwen3-moe"].make(0.0, "sdpa"))
    agrees(peft.get_peft_model(model, config).train(), "part", make, tmp_path)


def test_a_head_with_an_adapter_is_refused_there_and_trained_here(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head"])
    plain: Any = peft.get_peft_model(llama(), config).train()
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        trainer(copy.deepcopy(plain), tmp_path)
    model = copy.deepcopy(plain)
    ckptfused.convert(model, loss="chunked")
    assert is_chunked(model)
    found = run(model, text_batch())
    close(found, run(plain, text_batch()), 1e-5)
    assert any("lora" in name for name in found)
