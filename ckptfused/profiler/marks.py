"""Marks of where in a step each phase begins, by hooks on the layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import is_transformed
from ckptfused.compat.torch_memory import sparse_bytes
from ckptfused.models import find
from ckptfused.models.forward import ConvertedForward
from ckptfused.modules.fused import FusedModule
from ckptfused.profiler.phases import BACKWARD, END, FORWARD, HEAD_BACKWARD, REPLAY, Phase

Position = TypeVar("Position")


def _bytes(t: Tensor) -> int:
    return sparse_bytes(t) if t.layout == torch.sparse_coo else t.nbytes  # the gradient of an embedding, say


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
            given = _tensors((args, kwargs))
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
            x = next((t for t in _tensors(output) if t.requires_grad), None)
            if x is not None:
                x.register_hook(lambda _: self.add(Phase(BACKWARD.name, index)))

        own = vars(layer).get("forward")
        if type(layer) is nn.TransformerEncoderLayer and not layer.training and not isinstance(own, ConvertedForward):
            self._stack.enter_context(_around(layer, entered, left))  # a hook would end PyTorch's fast path
            return
        self._stack.callback(layer.register_forward_pre_hook(entered, with_kwargs=True).remove)
        # A checkpoint stops its replay by an exception.
        self._stack.callback(layer.register_forward_hook(left, always_call=True).remove)

    def _finished(self, index: int) -> None:
        """The gradient of a layer's input has been made. What comes before it may have begun at the same time."""
        if self._now.layer == index:
            self.add(BACKWARD)


def _tensors(value: Any) -> list[Tensor]:
    """Tensors that a layer takes or gives; those of a transform (`torch.func`) have no memory and no hooks."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and not is_transformed(t)]


@contextlib.contextmanager
def _around(layer: nn.Module, entered: Callable[..., None], left: Callable[..., None]) -> Iterator[None]:
    """A context in which a layer's forward tells both, as its hooks would be told."""
    plain, own = layer.forward, vars(layer).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = None
        entered(layer, args, kwargs)
        try:
            output = plain(*args, **kwargs)
        finally:
            left(layer, args, output)
        return output

    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward
        vars(layer).update({} if own is None else {"forward": own})
