"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch.nn.parallel import DistributedDataParallel

from ckptfused.integrations.run import RunFigures, TrainingRun, plain_optimizer
from ckptfused.spec.checks import check_flag

_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}

_LIGHTNINGS_OWN = (
    LightningModule.on_before_zero_grad,
    LightningModule.optimizer_zero_grad,
    Callback.on_before_zero_grad,
)


class LightningCallback(RunFigures, Callback):
    """Converts the model when training begins, and says at the end what was saved: `Trainer(callbacks=[…])`.

    module: the name of the submodule to convert, such as "model"; "": the LightningModule itself.
    options: those of `ckptfused.convert`. With `budget=` give the `batch` that this module is called with, for planning
    does not know how `training_step` calls it; `optimizer`, `autocast` and `gradient_accumulation_steps` are the
    trainer's.
    free_gradients: whether with a plan the gradients of a step are freed before the next one's forward; Lightning frees
    them after it, where `training_step` and hooks may still read them. Otherwise, in manual optimization, and where
    somebody overrides `on_before_zero_grad` or `optimizer_zero_grad`, the plan has them in each forward.
    every: steps from one whose peak is compared with the plan to the next; the first is.
    revert_before_saving: the model is reverted when training ends. Lightning's checkpoints hold a `state_dict`, which
    is the same while the model is converted.

    `report` is what `convert` said, `peaks` the measured peaks by step, `summary()` what was saved.

    **Raises** when training begins what `ckptfused.convert` raises.
    """

    def __init__(
        self,
        module: str = "",
        *,
        every: int = 100,
        revert_before_saving: bool = False,
        free_gradients: bool = True,
        **options: Any,
    ) -> None:
        self.module = module
        self.free_gradients = check_flag("free_gradients", free_gradients)
        self._frees = False
        self.run = TrainingRun(every, revert_before_saving, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Converts the model."""
        self._frees = self.free_gradients and "budget" in self.run.options and not _reads_gradients(trainer, pl_module)
        self.run.begin(
            pl_module.get_submodule(self.module),
            optimizer=plain_optimizer(next(iter(trainer.optimizers), None)),
            autocast=_AUTOCAST.get(trainer.precision),
            gradient_accumulation_steps=max(trainer.accumulate_grad_batches, 1 if self._frees else 2),
            replicated=isinstance(trainer.strategy.model, DistributedDataParallel),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to measure a batch, without the gradients of the step before."""
        if self._frees and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        self.run.step_begins(trainer.global_step + 1, plain_optimizer(next(iter(trainer.optimizers), None)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compares it with the plan."""
        self.run.step_ends()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Says what was saved."""
        self.run.end()


def _reads_gradients(trainer: Any, pl_module: Any) -> bool:
    """Whether somebody has a say in when gradients go, or looks at them just before."""
    if not pl_module.automatic_optimization:
        return True
    hooks = [pl_module.on_before_zero_grad, pl_module.optimizer_zero_grad]
    hooks += [callback.on_before_zero_grad for callback in trainer.callbacks]
    return any(getattr(hook, "__func__", hook) not in _LIGHTNINGS_OWN for hook in hooks)
