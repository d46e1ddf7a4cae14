"""The callback in TRL's SFTTrainer; TRL and datasets are no part of the test group: skipped without them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

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
    assert callback.report.fused == 2 and callback.report.peak is not None and len(callback.peaks) == 4
