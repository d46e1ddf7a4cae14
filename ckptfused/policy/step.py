"""The memory of a whole training step, counted by running it on meta tensors with an open ledger (`cost.OpenLedger`).

Nothing is computed and no weights are needed. The ledger sees every storage of the meta device begin and end, PyTorch's
and ckptfused's alike; hooks on the layers say when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ckptfused.convert import find
from ckptfused.convert.measure import storage
from ckptfused.cost import OpenLedger
from ckptfused.policy.meta import functions_for_meta

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the peak of a training step; the parts add up to it."""

    peak: int
    weights: int
    """Parameters and buffers, and the batch."""
    optimizer: int
    """What the optimizer keeps between steps."""
    gradients: int
    """Those of parameters that are there at the peak."""
    layers: int
    """What forward made up to the last layer and backward still needs, or forward itself just then."""
    loss_head: int
    """What was made after the last layer, logits and their gradients."""
    transients: int
    """The rest: what a layer's backward, or the optimizer, holds for itself."""
    moment: str
    """When: `"backward of model.layers.3: aten::mm"`."""

    @property
    def above_state(self) -> int:
        """The peak less what is there between steps: weights and optimizer state."""
        return self.peak - self.weights - self.optimizer


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as Hugging Face's Trainer uses it: fused."""
    return torch.optim.AdamW(parameters, fused=True)


def step_memory(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: MakeOptimizer | None = adamw,
    *,
    device: str = "cuda",
    threads: int | None = None,
) -> StepMemory:
    """The peak of one training step: forward, loss, backward and, where there is one, the optimizer's step.

    model: on the meta device (built under `torch.device("meta")`), as it trains: converted, checkpointed or plain.
    batch: what `model(**batch)` takes, tensors of any device, of which only shapes and types count; the loss is the
    output's `loss`, or the output itself. optimizer: makes one of the parameters that are trained; None: there is none.
    It is a step in the midst of training: the optimizer has its state, gradients are made anew.
    device, threads: as in `cost.OpenLedger`.

    Exact to what the allocator is asked for, but for what an op of PyTorch's allocates and frees within itself, and for
    workspaces and fragmentation. Attention is a flash kernel's. A fused optimizer's step allocates nothing.
    **Raises** `ValueError` if a parameter or buffer is not on the meta device.
    """
    owned = [*model.parameters(), *model.buffers()]
    elsewhere = {str(t.device) for t in owned if not t.is_meta}
    if elsewhere:
        raise ValueError(
            f'model: expected one built within torch.device("meta"), got tensors on {", ".join(elsewhere)}'
        )
    batch = {name: tree_map(_meta, value) for name, value in batch.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    keeper = None if optimizer is None or not trained else _with_state(optimizer, trained)
    model.zero_grad(set_to_none=True)
    with functions_for_meta(device), _Marks(model, OpenLedger(device, threads)) as marks:
        loss = _loss(model(**batch))
        marks.add("backward of the loss head")
        loss.backward()
        del loss
        if keeper is not None and not keeper.defaults.get("fused"):
            marks.add("optimizer")
            keeper.step()
        marks.add("gradients")
        model.zero_grad(set_to_none=True)
    state = [] if keeper is None else tree_leaves(list(keeper.state.values()))
    return marks.at_the_peak(_bytes([*owned, *tree_leaves(batch)]), _bytes(state))


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def _bytes(values: Iterable[Any]) -> int:
    """Of unique storages."""
    found = {storage(t): t.untyped_storage().nbytes() for t in values if isinstance(t, Tensor)}
    return sum(found.values())


def _with_state(make: MakeOptimizer, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that has taken a step. Fused ones know no meta tensors, but keep what others of their class do."""
    optimizer = make(trained)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    for group in optimizer.param_groups:
        group.update({name: False for name in ("fused", "foreach") if group.get(name)})
    optimizer.step()
    return optimizer


FORWARD, HEAD = "forward", "forward of the loss head"


class _Marks:
    """An open ledger, with marks of where in the step its events are."""

    def __init__(self, model: nn.Module, opened: OpenLedger) -> None:
        self._model = model
        self._opened = opened
        self._marks: list[tuple[int, str]] = []
        self._ended = 0  # the event with which the layers' forward ended
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Marks:
        found = list(find.layers(self._model))
        for place, (name, layer, _) in enumerate(found):
            self._watch(name, layer, last=place == len(found) - 1)
        self._stack.enter_context(self._opened)
        self.add(FORWARD)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, name: str) -> None:
        self._marks.append((len(self._opened), name))

    def _watch(self, name: str, layer: nn.Module, last: bool) -> None:
        def entered(module: nn.Module, args: Any) -> None:
            if not self._in_backward:  # a checkpoint calls it again
                self.add(f"forward of {name}")

        def left(module: nn.Module, args: Any, output: Any) -> None:
            if self._in_backward:
                return
            if last:
                self.add(HEAD)
            x = next(t for t in tree_leaves(output) if isinstance(t, Tensor))
            if x.requires_grad:
                x.register_hook(lambda _: self.add(f"backward of {name}"))

        self._stack.callback(layer.register_forward_pre_hook(entered).remove)
        self._stack.callback(layer.register_forward_hook(left).remove)

    @property
    def _in_backward(self) -> bool:
        return any(name.startswith("backward") for _, name in self._marks)

    def at_the_peak(self, weights: int, optimizer: int) -> StepMemory:
        ledger = self._opened.ledger
        top, live = ledger.at_the_peak
        places = {name: index for index, name in reversed(self._marks)}
        released = (event for event in ledger.events[places["gradients"] :] if event[0] == "release")
        gradients = {event[3][0] for event in released}
        of_layers = places.get(HEAD, places["backward of the loss head"])
        of_head = next((i for i, name in self._marks if i >= of_layers and name not in _OF_HEAD), len(ledger.events))
        parts = dict.fromkeys(("gradients", "layers", "loss_head", "transients"), 0)
        for number, (index, size) in live.items():
            kind = "layers" if index < of_layers else "loss_head" if index < of_head else "transients"
            parts["gradients" if number in gradients else kind] += size
        phase = [name for index, name in self._marks if index <= top][-1]
        peak = weights + optimizer + sum(parts.values())
        moment = f"{phase}: {ledger.name(ledger.events[top])}"
        return StepMemory(peak, weights, optimizer, **parts, moment=moment)


_OF_HEAD = (HEAD, "backward of the loss head")
