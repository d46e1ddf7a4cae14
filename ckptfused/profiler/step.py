"""A training step that is run to be looked at: hooks on the layers say what runs when."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ckptfused.models import find
from ckptfused.modules.fused import FusedModule
from ckptfused.profiler.phases import BACKWARD, END, FORWARD, HEAD_BACKWARD, OPTIMIZER, REPLAY, Phase
from ckptfused.spec.checks import nearest

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor
Position = TypeVar("Position")


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


def misspelt(model: Any, batch: Any) -> str:
    """The end of an error: a name in the batch that the model's forward does not have, and one like it that it has."""
    inner = getattr(model, "get_base_model", lambda: model)()  # PEFT's takes any name
    try:
        names = inspect.signature(inner.forward).parameters
    except (TypeError, ValueError):  # of code that is not Python's
        return ""
    for key in batch if isinstance(batch, Mapping) else ():
        if key not in names and (near := nearest(str(key), [name for name in names if name not in batch])):
            return f". {type(inner).__name__}.forward has no argument {key!r}{near}"
    return ""


def called(model: nn.Module, batch: Batch) -> Any:
    """The model's output of a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def made(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer itself, or the one that is made of what the model trains. **Raises** `TypeError` for neither."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise TypeError(
            "optimizer: expected a torch.optim.Optimizer, or what makes one of a list of parameters, such as "
            f"torch.optim.AdamW, got {optimizer!r}"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    return optimizer(trained) if trained else None


class NoLossError(ValueError):
    """A model's output has no loss, or none that can be differentiated."""


def loss_of(output: Any) -> Tensor:
    """What a step differentiates: an output's `loss`, or the output itself, or the first of a tuple or list; the sum of
    its entries if it is no scalar. **Raises** `ValueError` where there is none."""
    if isinstance(output, Tensor):
        found: Any = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = getattr(output, "loss", output[0] if isinstance(output, tuple | list) and output else None)
    if not isinstance(found, Tensor):
        raise NoLossError(
            f"batch: expected one with labels, so that the model gives a loss, or a model that gives a tensor, got "
            f"{type(output).__name__} without a loss"
        )
    if not found.requires_grad:
        raise NoLossError(
            "model: expected one whose loss requires a gradient, got one that trains no parameter, or under no_grad"
        )
    return found if found.dim() == 0 else found.sum()


def _bytes(t: Tensor) -> int:
    if t.layout == torch.sparse_coo:  # the gradient of an embedding, say
        return t._indices().nbytes + t._values().nbytes
    return t.nbytes


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
        self._stamp = stamp
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
        self.found.append((self._stamp(), phase))

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


def run_step(
    model: nn.Module,
    batch: Batch,
    optimizer: Callable[[], object] | None,
    marks: Marks[Any],
    forward: contextlib.AbstractContextManager[object],
    gradient_accumulation_steps: int = 1,
) -> list[int]:
    """One step under marks, at whose end the gradients are released; the bytes of them by layer. forward: what is
    around the forward pass. Where gradients add up over several batches, two run, each up to `END`: from the second on
    all need the same."""
    for last in (False, True)[gradient_accumulation_steps == 1 :]:
        marks.add(FORWARD)
        with forward:
            try:
                loss = loss_of(called(model, batch))
            except NoLossError as error:
                raise NoLossError(f"{error}{misspelt(model, batch)}") from None
        marks.add(HEAD_BACKWARD)
        loss.backward()
        del loss
        if last and optimizer is not None:
            marks.add(OPTIMIZER)
            optimizer()
        marks.add(END)
    sizes = marks.layer_gradients()
    model.zero_grad(set_to_none=True)
    return sizes
