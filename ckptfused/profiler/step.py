"""A training step: what a user asked for, and how one is run to be looked at."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ckptfused.profiler.marks import Marks
from ckptfused.profiler.phases import END, FORWARD, HEAD_BACKWARD, OPTIMIZER
from ckptfused.simulate.autocast import region
from ckptfused.simulate.devices import Device
from ckptfused.spec.checks import check_integer, nearest
from ckptfused.state.fingerprints import tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor


@dataclass(frozen=True)
class TrainingStep:
    """One training step of a model, as the keywords of a public call describe it.

    **Raises** `ValueError` for a count below 1, and for updates in backward of gradients that add up or are sharded.
    """

    batch: Batch
    optimizer: torch.optim.Optimizer | MakeOptimizer | None
    device: Device | torch.device
    """The device that it is predicted for, or PyTorch's own, on which it runs."""
    autocast: torch.dtype | None = None
    """The type of `torch.autocast` around the forward pass."""
    gradient_accumulation_steps: int = 1
    """Batches whose gradients add up before the optimizer's step."""
    shards: int = 1
    """Ranks over which FSDP2 shards the model."""
    release: bool = False
    """Whether the optimizer updates each weight in backward (`models.release`)."""

    def __post_init__(self) -> None:
        check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        check_integer("shards", self.shards, 1)
        if self.release and (self.optimizer is None or self.gradient_accumulation_steps * self.shards > 1):
            raise ValueError("release: expected a step with an optimizer, of one batch, on one device (shards=1)")

    @property
    def kind(self) -> str:
        """The device's, "cpu" or "cuda"."""
        return self.device.type if isinstance(self.device, torch.device) else self.device.kind

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer itself, or the one made of what the model trains; **raises** `TypeError` for neither."""
        if self.optimizer is None or isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer
        if not callable(self.optimizer):
            what = "a torch.optim.Optimizer, or what makes one of a list of parameters, such as torch.optim.AdamW"
            raise TypeError(f"optimizer: expected {what}, got {self.optimizer!r}")
        trained = [p for p in model.parameters() if p.requires_grad]
        return self.optimizer(trained) if trained else None


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as Hugging Face's Trainer uses it: fused."""
    return torch.optim.AdamW(parameters, fused=True)


def check_model(model: object) -> None:
    """**Raises** `TypeError` for what is no module, `ValueError` for one whose parameters its first call will make."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise ValueError(f"model: expected parameters with a shape, got {name} of a lazy module: call it once")


def has_vocabulary(model: nn.Module) -> bool:
    """Whether a projection has as many classes as an embedding has rows, as a language model's head."""
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return any(isinstance(module, nn.Linear) and module.out_features in rows for module in model.modules())


def misspelt(model: Any, batch: Any, least: float = 0.6) -> str:
    """The end of an error: a name in the batch that forward does not have, and one like it that it has (`nearest`)."""
    inner = getattr(model, "get_base_model", lambda: model)()  # PEFT's takes any name
    try:
        taken = inspect.signature(inner.forward).parameters
    except (TypeError, ValueError):  # of code that is not Python's
        return ""
    for key in batch if isinstance(batch, Mapping) else ():
        free = [name for name, p in taken.items() if name not in batch and "VAR" not in p.kind.name]  # no *args
        if key not in taken and (near := nearest(str(key), free, least)):
            return f". {type(inner).__name__}.forward has no argument {key!r}{near}"
    return ""


def model_output(model: nn.Module, batch: Batch) -> Any:
    """The model's output of a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


class NoLossError(ValueError):
    """A model's output has no loss, or none that can be differentiated."""


def loss_of(output: Any, any_tensor: bool = False) -> Tensor:
    """What a step differentiates: an output's `loss`, or the output itself, or the first of a tuple or list; the sum of
    its entries if it is no scalar, for sums of batches add up to that of their union.

    any_tensor: without a loss, the first tensor within that can be differentiated. Its entries have weights that differ
    then: of a plain sum, a norm before it has no gradient.
    **Raises** `NoLossError` where there is none.
    """
    found: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if any_tensor and (not isinstance(found, Tensor) or found.is_complex()):
        return _weighted(_differentiable(output))
    if isinstance(output, Tensor):
        found = output
    elif not hasattr(output, "loss") and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise NoLossError(
            f"batch: expected one with labels, so that the model gives a loss, or a model that gives a tensor, got "
            f"{type(output).__name__} without a loss"
        )
    return _trained(found if found.dim() == 0 else found.sum())


def _trained(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise NoLossError(
            "model: expected one whose loss requires a gradient, got one that trains no parameter, or under no_grad"
        )
    return loss


def _differentiable(output: Any) -> Tensor:
    """The first tensor of an output that requires a gradient, as real numbers."""
    found = [t for t in tensors(output) if t.requires_grad]
    if not found:
        raise NoLossError(f"model: expected one whose output requires a gradient, got {type(output).__name__}")
    return torch.view_as_real(found[0]) if found[0].is_complex() else found[0]


def _weighted(t: Tensor) -> Tensor:
    if t.dim() == 0:
        return t
    weights = torch.linspace(0.5, 1.5, t.numel(), device=t.device, dtype=torch.float32).view(t.shape)
    return (t.float() * weights).sum() / t.numel()


def forward_and_backward(
    model: nn.Module,
    batch: Batch,
    around: contextlib.AbstractContextManager[object],
    backward_begins: Callable[[Tensor], object],
    any_tensor: bool = False,
) -> None:
    """One batch of a step. around: what is around its forward pass; backward_begins: is told of the loss."""
    with around:
        loss = loss_of(model_output(model, batch), any_tensor)
    backward_begins(loss)
    loss.backward()


def run_step(
    model: nn.Module,
    step: TrainingStep,
    optimize: Callable[[], object] | None,
    marks: Marks[Any],
) -> list[int]:
    """One step under marks, at whose end the gradients are released; the bytes of them by layer. Where gradients add up
    over several batches, two run, each up to `END`: from the second on all need the same.

    optimize: what is done in the place of the optimizer's step.
    """
    for last in (False, True)[step.gradient_accumulation_steps == 1 :]:
        marks.add(FORWARD)
        around = region(step.kind, step.autocast)
        try:
            forward_and_backward(model, step.batch, around, lambda loss: marks.add(HEAD_BACKWARD))
        except NoLossError as error:
            raise NoLossError(f"{error}{misspelt(model, step.batch)}") from None
        if last and optimize is not None:
            marks.add(OPTIMIZER)
            optimize()
        marks.add(END)
    sizes = marks.layer_gradients()
    model.zero_grad(set_to_none=True)
    return sizes
