"""A training step: what a user asked for, and how one is run to be looked at, with hooks that say what runs when."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_memory import sparse_bytes
from ckptfused.models import find
from ckptfused.modules.fused import FusedModule
from ckptfused.profiler.phases import BACKWARD, END, FORWARD, HEAD_BACKWARD, OPTIMIZER, REPLAY, Phase
from ckptfused.simulate.autocast import region
from ckptfused.simulate.devices import Device
from ckptfused.spec.checks import check_integer, nearest
from ckptfused.state.fingerprints import tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor
Position = TypeVar("Position")


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


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that `models.find.layers` finds, and modules of ckptfused's own, in the order of the model."""
    layers = [(name, layer) for name, layer, _ in find.layers(model)]
    inside = {module for _, layer in layers for module in layer.modules()}
    own: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, FusedModule) and module not in inside:
            own.append((name, module))
            inside.update(module.modules())
    if not own:
        return layers
    order = {module: place for place, module in enumerate(model.modules())}
    return sorted(layers + own, key=lambda found: order[found[1]])


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


def _bytes(t: Tensor) -> int:
    return sparse_bytes(t) if t.layout == torch.sparse_coo else t.nbytes  # the gradient of an embedding, say


class Marks(Generic[Position]):
    """Marks of where in a step each phase begins.

    stamp: says where it is now, as a place among events, a time or whatever a way of trace has.
    """

    def __init__(self, model: nn.Module, stamp: Callable[[], Position]) -> None:
        self.found: list[tuple[Position, Phase]] = []
        self.failed: int | None = None
        """The layer whose forward raised."""
        self.received: Callable[[int, Tensor], None] = lambda layer, t: None
        """Is told of each tensor that a layer is given in forward."""
        self.layers = layers_of(model)
        self.stamp = stamp
        self._in_backward = False
        self._within: list[Phase] = []
        self._stack = contextlib.ExitStack()

    @property
    def names(self) -> list[str]:
        """The layers'."""
        return [name for name, _ in self.layers]

    def layer_gradients(self) -> list[int]:
        """Bytes of the gradients that there are, by layer."""
        seen: set[nn.Parameter] = set()
        sizes = []
        for _, layer in self.layers:
            own = [p for p in layer.parameters() if p not in seen]
            seen.update(own)
            sizes.append(sum(_bytes(p.grad) for p in own if p.grad is not None))
        return sizes

    def __enter__(self) -> Marks[Position]:
        for index, (_, layer) in enumerate(self.layers):
            self._watch(index, layer)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, phase: Phase) -> None:
        self._in_backward = phase == HEAD_BACKWARD or (self._in_backward and phase != END)
        self.found.append((self.stamp(), phase))

    @property
    def _now(self) -> Phase:
        return self.found[-1][1]

    def _watch(self, index: int, layer: nn.Module) -> None:
        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._within.append(self._now)
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if not self._in_backward:
                for t in given:
                    self.received(index, t)
            self.add(Phase(REPLAY if self._in_backward else FORWARD.name, index))
            x = next((t for t in given if t.requires_grad), None)
            if x is not None and not self._in_backward:
                x.register_hook(lambda _: self._finished(index))

        def left(module: nn.Module, args: Any, output: Any) -> None:
            if output is None and not self._in_backward and self.failed is None:
                self.failed = index
            self.add(self._within.pop())
            x = next((t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad), None)
            if x is not None:
                x.register_hook(lambda _: self.add(Phase(BACKWARD.name, index)))

        self._stack.callback(layer.register_forward_pre_hook(entered, with_kwargs=True).remove)
        # A checkpoint stops its replay by an exception.
        self._stack.callback(layer.register_forward_hook(left, always_call=True).remove)

    def _finished(self, index: int) -> None:
        """The gradient of a layer's input has been made. What comes before it may have begun at the same time."""
        if self._now.layer == index:
            self.add(BACKWARD)


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
