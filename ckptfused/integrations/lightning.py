"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from ckptfused.integrations.run import RunFigures, TrainingRun, plain_optimizer

_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


class LightningCallback(RunFigures, Callback):
    """Converts the model when training begins, and says at the end what was saved: `Trainer(callbacks=[…])`.

    module: the name of the submodule to convert, such as "model"; "": the LightningModule itself.
    options: those of `ckptfused.convert`. With `budget=` give the `batch` that this module is called with, for planning
    does not know how `training_step` calls it; `optimizer`, `autocast` and `gradient_accumulation_steps` are the
    trainer's.
    every: steps from one whose peak is compared with the plan to the next; the first is.
    revert_before_saving: the model is reverted when training ends. Lightning's checkpoints hold a `state_dict`, which
    is the same while the model is converted.

    `report` is what `convert` said, `peaks` the measured peaks by step, `summary()` what was saved.

    **Raises** when training begins what `ckptfused.convert` raises.
    """

    def __init__(
        self, module: str = "", *, every: int = 100, revert_before_saving: bool = False, **options: Any
    ) -> None:
        self.module = module
        self.run = TrainingRun(every, revert_before_saving, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Converts the model."""
        self.run.begin(
            pl_module.get_submodule(self.module),
            optimizer=plain_optimizer(next(iter(trainer.optimizers), None)),
            autocast=_AUTOCAST.get(trainer.precision),
            gradient_accumulation_steps=trainer.accumulate_grad_batches,
            replicated=isinstance(trainer.strategy.model, DistributedDataParallel),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to measure a batch."""
        self.run.step_begins(trainer.global_step + 1, plain_optimizer(next(iter(trainer.optimizers), None)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compares it with the plan."""
        self.run.step_ends(max(trainer.global_step, 1))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Says what was saved."""
        self.run.end()
