"""The callback in Trainer: losses are those of the plain model, whatever else the trainer does."""

from __future__ import annotations

import functools
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptfused.integrations import CkptfusedCallback
from ckptfused.models.forward import ConvertedForward
from tests.cases import by_turns
from tests.models.small import llama
from tests.models.test_trainer import Texts, assert_curves_agree, fine_tune, trainer_warnings

pytestmark = [pytest.mark.once, trainer_warnings]
LOGGER = "ckptfused.integrations.run"


def converted(model: torch.nn.Module) -> bool:
    return any(isinstance(vars(module).get("forward"), ConvertedForward) for module in model.modules())


class Long(Texts):
    """Texts of many more tokens than the others."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: t.repeat(100) for name, t in super().__getitem__(index).items()}


def train(
    folder: Path,
    callbacks: list[Any],
    model: Any = None,
    steps: int = 4,
    resume: str | None = None,
    texts: Any = None,
    **options: Any,
) -> Any:
    """The trainer after its steps, and the losses."""
    arguments = TrainingArguments(
        str(folder), max_steps=steps, learning_rate=1e-3, logging_steps=1, report_to="none", use_cpu=True,
        disable_tqdm=True, **{"save_strategy": "no", "per_device_train_batch_size": 3, **options},
    )  # fmt: skip
    trainer = Trainer(model or llama(), arguments, train_dataset=texts or Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_the_plain_model(accumulation: int, tmp_path: Path, caplog: Any) -> None:
    callback = CkptfusedCallback(every=2)
    with caplog.at_level(logging.INFO, LOGGER):
        trainer, got = train(tmp_path / "a", [callback], gradient_accumulation_steps=accumulation)
    _, want = fine_tune(llama(), tmp_path / "b", gradient_accumulation_steps=accumulation)
    assert_curves_agree(got, want)
    assert converted(trainer.model) and callback.report.fused == 2
    assert list(callback.peaks) == [1, 2, 4] and min(callback.peaks.values()) > 0
    assert callback.summary() in caplog.messages
    assert "2 of 2 layers fused; they save " in callback.summary() and "largest peak measured" in callback.summary()


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_budget_is_planned_for_the_trainers_step(accumulation: int, tmp_path: Path, caplog: Any) -> None:
    """The step has its optimizer and its own first rows; drawing those moves no generator, so losses stay those of
    before.
    """
    _, want = fine_tune(llama(), tmp_path / "b", gradient_accumulation_steps=accumulation)
    callback = CkptfusedCallback(every=1, budget="1GiB")
    with caplog.at_level(logging.INFO, LOGGER):
        _, got = train(tmp_path / "a", [callback], gradient_accumulation_steps=accumulation)
    assert_curves_agree(got, want)
    planned = callback.report.peak
    assert planned is not None and len(callback.peaks) == 4
    assert not [r for r in caplog.records if r.levelno > logging.INFO], caplog.messages
    assert 0.5 * planned < callback.peaks[4] <= planned  # what is not trained twice is not held twice
    assert f"{callback.peaks[4] / planned:.0%} of the plan's" in caplog.text


def test_a_step_beyond_its_plan_is_a_warning(tmp_path: Path, caplog: Any) -> None:
    """One that was planned for a shorter batch."""
    ids = torch.ones(1, 2, dtype=torch.long)
    callback = CkptfusedCallback(budget="1GiB", batch={"input_ids": ids, "labels": ids})
    with caplog.at_level(logging.INFO, LOGGER):
        train(tmp_path, [callback], steps=1, texts=Long())
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "plan for the longest batch" in record.getMessage()


def with_fused_head(model: Any) -> Any:
    """The model as TRL's trainers patch it: called with `fused_lm_head`, it makes its loss without logits."""
    own = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **given: Any) -> Any:
        if not fused_lm_head:
            return own(*args, labels=labels, **given)
        hidden = self.base_model(*args, **given).last_hidden_state
        return {"loss": hidden.float().square().mean() + self.lm_head.weight.sum() * labels.numel()}

    model.forward = types.MethodType(forward, model)
    return model


class TrainsWithFusedHead(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        return model(**inputs, fused_lm_head=True)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "own"), by_turns([False, True], [False, True]))
def test_a_plan_is_for_the_fused_head_of_trls_trainers(bf16: bool, own: bool, tmp_path: Path) -> None:
    """Under accelerate's autocast, too, whose wrapper is around the patched forward; a batch may say otherwise."""
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, bf16=bf16,
    )  # fmt: skip
    texts = Long()
    batch = {name: torch.stack([texts[i][name] for i in (0, 1)]) for name in texts[0]}
    callback = CkptfusedCallback(every=1, budget="1GiB", batch=batch | {"fused_lm_head": False} if own else None)
    trainer = TrainsWithFusedHead(
        with_fused_head(llama(vocab_size=1000)), arguments, train_dataset=texts, callbacks=[callback]
    )
    trainer.train()
    share = max(callback.peaks.values()) / callback.report.peak
    assert share < 0.5 if own else 0.85 < share <= 1


def test_what_does_not_fit_raises_when_training_begins(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match="budget"):
        train(tmp_path, [CkptfusedCallback(budget="1KiB")], model)
    assert not converted(model)


class Looks(TrainerCallback):
    """Whether the model is converted, when it is saved and at each step's begin."""

    def __init__(self) -> None:
        self.saved: list[bool] = []
        self.trained: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        self.trained.append(converted(held["model"]))


class LooksAtSaving(Trainer):
    looks: Looks

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.looks.saved.append(converted(self.model))
        super()._save_checkpoint(model, trial)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("reverts", [False, True])
def test_it_reverts_before_saving_if_asked(reverts: bool, strategy: str, tmp_path: Path) -> None:
    looks = Looks()
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=12, save_strategy=strategy, save_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = CkptfusedCallback(revert_before_saving=reverts, keep="attention")
    trainer = LooksAtSaving(llama(), arguments, train_dataset=Texts(), callbacks=[callback, looks])
    trainer.looks = looks
    trainer.train()
    assert looks.trained == [True] * 4
    assert looks.saved and set(looks.saved) == {not reverts}
    assert converted(trainer.model) != reverts


def test_resuming(tmp_path: Path) -> None:
    """A checkpoint of a converted model is one of the plain model, and training goes on from it with the callback."""
    _, want = fine_tune(llama(), tmp_path / "whole")
    train(tmp_path / "halves", [CkptfusedCallback()], save_strategy="steps", save_steps=2)
    callback = CkptfusedCallback()
    checkpoint = str(tmp_path / "halves" / "checkpoint-2")
    _, got = train(tmp_path / "rest", [callback], llama(seed=3), resume=checkpoint)
    assert_curves_agree(got, want)
    assert callback.report.fused == 2 and list(callback.peaks) == [3]


@pytest.mark.slow
def test_a_dataset_to_iterate_needs_a_batch(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Texts()[i] for i in range(24))

    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=3, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    for given in ({}, {"batch": {name: t[None] for name, t in Texts()[0].items()}}):
        callback = CkptfusedCallback(budget="1GiB", **given)
        trainer = Trainer(llama(), arguments, train_dataset=Stream(), callbacks=[callback])
        if given:
            trainer.train()
            assert callback.report.peak is not None
        else:
            with pytest.raises(ValueError, match="batch: pass batch= with budget="):
                trainer.train()


def test_what_it_is_given_is_checked() -> None:
    with pytest.raises(ValueError, match="every"):
        CkptfusedCallback(every=0)
    with pytest.raises(TypeError, match="revert_before_saving"):
        CkptfusedCallback(revert_before_saving="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bugdet: .*did you mean budget"):
        CkptfusedCallback(bugdet="1GiB")
    assert CkptfusedCallback().summary() == "ckptfused: training has not begun"
