"""A callback for `transformers.Trainer`, and so for TRL's trainers, which are made of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import TrainerCallback

from ckptfused.compat.accelerate import by_ddp
from ckptfused.compat.trl import as_trained
from ckptfused.integrations.run import RunFigures, TrainingRun, plain_optimizer


class CkptfusedCallback(RunFigures, TrainerCallback):
    """Converts the model when training begins, and says at the end what was saved: `Trainer(callbacks=[…])`.

    options: those of `ckptfused.convert`, with the same defaults. With `budget=` the callback plans: `batch` is made of
    the first rows of the training set unless given (give the longest), `optimizer`, `autocast` and
    `gradient_accumulation_steps` are the trainer's.
    every: steps from one whose peak is compared with the plan to the next; the first is. A message goes to the logger
    "ckptfused.integrations.run", a warning if the plan was exceeded.
    revert_before_saving: the model is reverted while it is saved, converted again afterwards, and reverted at the end
    of training. A `state_dict` is the same either way; this is for whoever pickles the model in a callback of theirs.

    `report` is what `convert` said, `peaks` the measured peaks by step, `summary()` what was saved.

    **Raises** when training begins what `ckptfused.convert` raises.
    """

    def __init__(self, *, every: int = 100, revert_before_saving: bool = False, **options: Any) -> None:
        self.run = TrainingRun(every, revert_before_saving, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Converts the model."""
        self.run.begin(
            held["model"],
            held.get("train_dataloader"),
            args.per_device_train_batch_size,
            optimizer=plain_optimizer(held.get("optimizer")),
            autocast="bfloat16" if args.bf16 else "float16" if args.fp16 else None,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            as_called=partial(as_trained, held["model"]),
            replicated=by_ddp(),  # not FSDP, nor DeepSpeed
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Begins to measure a step."""
        self.run.step_begins(state.global_step + 1, plain_optimizer(held.get("optimizer")))

    def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Compares it with the plan; a model that is about to be saved is reverted."""
        self.run.step_ends()
        if control.should_save:
            self.run.saving_begins()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """A model that is about to be saved is reverted."""
        if control.should_save:
            self.run.saving_begins()

    def on_save(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Converts it again."""
        self.run.saving_ends()

    def on_train_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Says what was saved."""
        self.run.end()
