"""TRL's SFTTrainer on a model whose layers and loss are converted, and what it refuses that `convert` takes.

TRL and datasets are no part of the test group: skipped without them. Shown with trl 1.16.0, datasets 5.2.0.
"""

from __future__ import annotations

import copy
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
from transformers import PreTrainedTokenizerFast

import ckptfused
from tests.models.compare import close, run
from tests.models.small import llama
from tests.models.test_loss_head import chunked, is_chunked
from tests.models.test_trainer import assert_curves_agree
from tests.models.zoo import VOCABULARY, text_batch

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that are numbers; the collator asks it for the id that pads."""
    words = {str(i): i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="1", eos_token="2", unk_token="0")


def texts() -> Any:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (5 + i % 7,), generator=draw).tolist() for i in range(24)]
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="texts")


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    arguments = trl.SFTConfig(
        str(folder), max_steps=4, per_device_train_batch_size=3, learning_rate=1e-3, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    for name, value in options.items():
        setattr(arguments, name, value)
    return trl.SFTTrainer(model, arguments, train_dataset=texts(), processing_class=tokenizer())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_the_plain_model(accumulation: int, tmp_path: Path) -> None:
    curves = []
    for model in (plain := llama(), chunked(plain)):
        model = copy.deepcopy(model)
        made = trainer(model, tmp_path / str(len(curves)), gradient_accumulation_steps=accumulation)
        made.train()
        curves.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert_curves_agree(curves[1], curves[0])


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
