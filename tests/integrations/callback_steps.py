"""What each of two ranks does that trains with the callback."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from ckptfused.integrations import CkptfusedCallback
from tests.models.ranks import RANKS
from tests.models.small import llama
from tests.models.test_trainer import Texts


class Long(Texts):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: t.repeat(20) for name, t in super().__getitem__(index).items()}


@contextlib.contextmanager
def _of_several(rank: int) -> Iterator[None]:
    """The environment of torchrun, for accelerate, whose state does not outlive it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    states: tuple[Any, ...] = (AcceleratorState, GradientState, PartialState)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        try:
            yield
        finally:
            for state in states:
                state._shared_state.clear()


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def imported(rank: int) -> None:
    """Nothing, once the libraries above are there, which takes longer than a test."""


def train(rank: int, folder: str, callback: CkptfusedCallback | None) -> tuple[Any, list[str]]:
    """A trainer after two steps, and the messages of this rank."""
    said, logger = _Said(), logging.getLogger("ckptfused.integrations.run")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        arguments = TrainingArguments(
            str(Path(folder) / str(rank)), max_steps=2, learning_rate=1e-3, logging_steps=1, report_to="none",
            use_cpu=True, disable_tqdm=True, save_strategy="no", per_device_train_batch_size=3,
        )  # fmt: skip
        trainer = Trainer(llama(), arguments, train_dataset=Long(), callbacks=[callback] if callback else [])
        trainer.train()
    finally:
        logger.removeHandler(said)
    return trainer, said.messages


def callback(rank: int, folder: str) -> None:
    """The plain model's losses and weights; one report, of the same plan and peaks, with the wrapper's buckets."""
    with _of_several(rank):
        plain, _ = train(rank, folder, None)
        made = CkptfusedCallback(budget="1GiB", every=1)
        trainer, messages = train(rank, folder, made)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) and made.report.fused == 2
    for p, expected in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
    heads = ["ckptfused: training begins", "ckptfused: step 1: ", "ckptfused: step 2: ", made.summary()]
    assert len(messages) == (len(heads) if rank == 0 else 0)
    assert all(message.startswith(head) for message, head in zip(messages, heads, strict=False))
    everyone: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(everyone, (made.report.peak, made.peaks, str(made.report.policy)))
    assert everyone[0] == everyone[1]
    assert "_ckptfused_buckets" not in dict(trainer.model.named_buffers())
    assert 0.98 * made.report.peak < made.peaks[2] <= made.report.peak  # buckets are 5 % of it


def callbacks_that_differ(rank: int, folder: str) -> None:
    """What one rank asks for and another does not, or what does not fit, raises on both."""
    for options, words in (
        ({"keep": "mid" if rank else "inputs"}, "ranks differ|rank 1 has"),
        ({"budget": "1KiB"}, "budget"),
    ):
        with _of_several(rank), pytest.raises(ValueError, match=words):
            train(rank, folder, CkptfusedCallback(**options))


def beyond_the_plan(rank: int, folder: str) -> None:
    """A warning is said by the rank that has it, by its name."""
    ids = torch.ones(1, 2, dtype=torch.long)
    made = CkptfusedCallback(budget="1GiB", batch={"input_ids": ids, "labels": ids})
    with _of_several(rank):
        _, messages = train(rank, folder, made)
    warned = [message for message in messages if "plan for the longest batch" in message]
    assert len(warned) == 1 and warned[0].startswith("ckptfused: rank 1, step 1:" if rank else "ckptfused: step 1:")
