"""The memory of a whole training step, counted by running it on meta tensors with an open ledger (`cost.OpenLedger`).

Nothing is computed and no weights are needed. The ledger sees every storage of the meta device begin and end, PyTorch's
and ckptfused's alike; hooks on the layers say when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """When: `"backward of layer 3: aten::mm"`."""
    phases: tuple[Peak, ...] = field(default=(), repr=False)
    """The most in each phase of the step."""

    @property
    def above_state(self) -> int:
        """The peak less what is there between steps: weights and optimizer state."""
        return self.peak - self.weights - self.optimizer

    @classmethod
    def of_phases(cls, weights: int, optimizer: int, phases: Iterable[Peak]) -> StepMemory:
        """Of the phase that needs most, the first where several do."""
        phases = tuple(phases)
        top = max(phases, key=lambda peak: sum(peak.parts))
        peak = weights + optimizer + sum(top.parts)
        return cls(peak, weights, optimizer, *top.parts, moment=f"{top.phase}: {top.what}", phases=phases)


class Phase(NamedTuple):
    """A stretch of a step, by the layer that runs where one does."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


Parts = tuple[int, int, int, int]


class Peak(NamedTuple):
    """The most that a phase holds: gradients, layers, loss head and transients, and what was allocated last."""

    phase: Phase
    parts: Parts
    what: str


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
        marks.add(HEAD_BACKWARD)
        loss.backward()
        del loss
        if keeper is not None and not keeper.defaults.get("fused"):
            marks.add(OPTIMIZER)
            keeper.step()
        marks.add(END)
        model.zero_grad(set_to_none=True)
    state = [] if keeper is None else tree_leaves(list(keeper.state.values()))
    return StepMemory.of_phases(_bytes([*owned, *tree_leaves(batch)]), _bytes(state), marks.peaks())


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


FORWARD, BACKWARD, OPTIMIZER, END = Phase("forward"), Phase("backward"), Phase("optimizer"), Phase("end")
HEAD, HEAD_BACKWARD = Phase("forward of the loss head"), Phase("backward of the loss head")


class _Marks:
    """An open ledger, with marks of where in the step its events are."""

    def __init__(self, model: nn.Module, opened: OpenLedger) -> None:
        self._model = model
        self._opened = opened
        self._marks: list[tuple[int, Phase]] = []
        self._in_backward = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Marks:
        layers = [layer for _, layer, _ in find.layers(self._model)]
        for index, layer in enumerate(layers):
            self._watch(index, layer, last=index == len(layers) - 1)
        self._stack.enter_context(self._opened)
        self.add(FORWARD)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, phase: Phase) -> None:
        self._in_backward = self._in_backward or phase == HEAD_BACKWARD
        self._marks.append((len(self._opened), phase))

    def _watch(self, index: int, layer: nn.Module, last: bool) -> None:
        def entered(module: nn.Module, args: Any) -> None:
            if not self._in_backward:  # a checkpoint calls it again
                self.add(Phase(FORWARD.name, index))

        def left(module: nn.Module, args: Any, output: Any) -> None:
            if self._in_backward:
                return
            if last:
                self.add(HEAD)
            x = next(t for t in tree_leaves(output) if isinstance(t, Tensor))
            if x.requires_grad:
                x.register_hook(lambda _: self.add(Phase(BACKWARD.name, index)))

        self._stack.callback(layer.register_forward_pre_hook(entered).remove)
        self._stack.callback(layer.register_forward_hook(left).remove)

    def peaks(self) -> list[Peak]:
        """Of each phase but the end, in which the gradients are released."""
        ledger = self._opened.ledger
        begins = {phase: index for index, phase in reversed(self._marks)}
        released = (event for event in ledger.events[begins[END] :] if event[0] == "release")
        gradients = {event[3][0] for event in released}
        of_layers = begins.get(HEAD, begins[HEAD_BACKWARD])
        of_head = next(i for i, phase in self._marks if i >= of_layers and phase not in (HEAD, HEAD_BACKWARD))
        found, now, kinds = [], [0, 0, 0, 0], {}
        for (begin, phase), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            best, parts, top = -1, (0, 0, 0, 0), begin
            for index in range(begin, end):
                kind, _, _, (number, size, *_), _ = ledger.events[index]
                if kind == "allocation":
                    made = 1 if index < of_layers else 2 if index < of_head else 3
                    kinds[number] = 0 if number in gradients else made
                    now[kinds[number]] += size
                    if sum(now) > best:
                        best, parts, top = sum(now), (now[0], now[1], now[2], now[3]), index
                elif kind == "release":
                    now[kinds.pop(number)] -= size
            if best >= 0:
                found.append(Peak(phase, parts, ledger.name(ledger.events[top])))
        return found


def extrapolated(few: StepMemory, more: StepMemory, layers: tuple[int, int, int], period: int = 1) -> StepMemory:
    """The memory of a step of a model with more layers, from two predictions of it with fewer.

    layers: of `few`, of `more`, and of the model: at least 2, at least one more, any, in steps of `period`, after which
    layers repeat. In each phase at the ends of the stack every part is a line in the number of layers; between the ends
    phases need no more than at one of them.
    """
    less, greater, all_ = layers

    def line(a: int, b: int) -> int:
        return a + (b - a) * (all_ - less) // (greater - less)

    def places(memory: StepMemory, depth: int) -> dict[Phase, Peak]:
        """The phases under the names that they have in the whole model."""
        found = {}
        for peak in memory.phases:
            index = peak.phase.layer
            if index is not None and index >= depth - period:
                found[Phase(peak.phase.name, index + all_ - depth)] = peak
            elif index is None or index < period:
                found[peak.phase] = peak
        return found

    ends, others = places(few, less), places(more, greater)
    phases = []
    for phase in filter(others.__contains__, ends):
        gradients, of_layers, head, transients = map(line, ends[phase].parts, others[phase].parts)
        phases.append(Peak(phase, (gradients, of_layers, head, transients), others[phase].what))
    return StepMemory.of_phases(line(few.weights, more.weights), line(few.optimizer, more.optimizer), phases)
