"""The callback in TRL's SFTTrainer; TRL and datasets are no part of the test group: skipped without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import datasets
import trl

from ckptfused.integrations import CkptfusedCallback
from tests.models.small import llama
from tests.models.test_trainer import assert_curves_agree
from tests.models.test_trl import texts, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_the_plain_model(accumulation: int, tmp_path: Path) -> None:
    callback, curves = CkptfusedCallback(budget="1GiB", every=1), []
    for callbacks in ([], [callback]):
        arguments = trl.SFTConfig(
            str(tmp_path / str(len(curves))), max_steps=4, per_device_train_batch_size=3, learning_rate=1e-3,
            logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False,
            gradient_checkpointing=False, gradient_accumulation_steps=accumulation,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            llama(), arguments, train_dataset=texts(), processing_class=tokenizer(), callbacks=callbacks
        )
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert_curves_agree(curves[1], curves[0])
    assert callback.report.fused == 2 and len(callback.peaks) == 4


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 0.9),  # bfloat16 and its own checkpointing, which are TRL's defaults
        ({"bf16": False, "gradient_accumulation_steps": 2}, 0.98),
        ({"bf16": False, "loss_type": "dft"}, 0.98),
        ({"bf16": False, "label_smoothing_factor": 0.1}, 0.8),  # logits, and no more of them than a plan expects
    ],
)
def test_a_plan_is_for_trls_own_loss(options: dict[str, Any], least: float, tmp_path: Path) -> None:
    """It makes no logits of all tokens; its tiles were 2.5 times what a plan for logits expected."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 3000, (128,), generator=draw).tolist() for _ in range(6)]
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": rows})
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True}, **options,
    )  # fmt: skip
    callback = CkptfusedCallback(budget="1GiB", every=1)
    trainer = trl.SFTTrainer(
        llama(vocab_size=3000), arguments, train_dataset=datasets.Dataset(table, fingerprint="long texts"),
        processing_class=tokenizer(), callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert least < max(callback.peaks.values()) / callback.report.peak <= 1
