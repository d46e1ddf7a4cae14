"""Recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) on the CPU at hand: what one holds is measured, where it runs alone.

oneDNN's recurrent layers keep a workspace of their own for backward, which tensors without data do not show: a layer on
the meta device is made of single products instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ckptfused.compat.kernels import operation
from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_memory import allocations, storage_id
from ckptfused.simulate.alone import OpCall
from ckptfused.simulate.roofline import Work
from ckptfused.simulate.scratch import LARGEST, MOST_FLOPS

OPS = tuple(f"{kind}.{given}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for given in ("input", "data"))
"""Each takes input, initial states, parameters, whether they have biases, the number of layers, the probability of
dropout, and whether it trains, goes both ways and has its batch first; of a packed input ("data") the number of
sequences at each step comes behind it, and there is no batch to come first."""


class _Layer(NamedTuple):
    """The arguments of one of `OPS`."""

    x: Tensor
    packed: tuple[int, ...] | None
    """The number of sequences at each step of a packed input."""
    states: Any
    parameters: list[Tensor]
    options: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, args: Any) -> _Layer | None:
        """None: of a packed input whose lengths are not known."""
        if not name.endswith("data"):
            return cls(args[0], None, args[1], args[2], args[3:])
        return None if args[1].is_meta else cls(args[0], tuple(args[1].tolist()), args[2], args[3], args[4:])

    def args(self) -> tuple[Any, ...]:
        sizes = () if self.packed is None else (torch.tensor(self.packed),)
        return (self.x, *sizes, self.states, self.parameters, *self.options)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that may have gradients."""
        return tree_leaves((self.x, self.states, self.parameters))

    @property
    def batch_first(self) -> bool:
        return self.packed is None and self.options[-1]

    @property
    def steps_and_batch(self) -> tuple[int, int]:
        """The steps of a sequence, and the sequences; a packed input counts as one with the steps of all."""
        if self.packed is not None:
            return len(self.x), 1
        return (self.x.size(1), self.x.size(0)) if self.batch_first else (self.x.size(0), self.x.size(1))


class _Modes(NamedTuple):
    """What decides what a call keeps, beside its arguments."""

    needs: tuple[bool, ...]
    """Which tensors need gradients."""
    lower: torch.dtype | None
    """Autocast's type."""
    trains: bool
    """Whether gradients are on: then a workspace is made even where no tensor needs any."""


class Measured(NamedTuple):
    """Bytes and seconds of one call."""

    kept: int
    """From forward to backward, beside operands and results."""
    keeps_output: bool
    """Whether it needs its first result in backward."""
    forward_scratch: int
    """The most that forward holds beside its results."""
    backward_scratch: int
    """The most that backward holds beside the gradients."""
    seconds: tuple[float, float]
    """Forward takes the first, backward the second."""
    types: tuple[torch.dtype, ...]
    """The results'."""

    def times(self, parts: int) -> Measured:
        """What so many such calls need at once."""
        names = ("kept", "forward_scratch", "backward_scratch")
        sizes: dict[str, Any] = {name: parts * getattr(self, name) for name in names}
        return self._replace(**sizes, seconds=(parts * self.seconds[0], parts * self.seconds[1]))


class _Recurrent(torch.autograd.Function):
    """A layer as it was measured. of: says what it needs, told whether backward is given entries one after the other.
    shapes: the results', as they are in memory, without a batch that comes first, unless `batch_first`."""

    @staticmethod
    def forward(
        ctx: Any,
        of: Callable[[bool], Measured],
        spend: Callable[[float], None],
        shapes: Any,
        batch_first: bool,
        *given: Tensor,
    ) -> Any:
        x, measured = given[0], of(True)
        made = tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, measured.types, strict=True))
        kept = x.new_empty(measured.kept, dtype=torch.uint8)
        x.new_empty(measured.forward_scratch, dtype=torch.uint8)
        ctx.save_for_backward(*given, kept, made[0] if measured.keeps_output else None)
        ctx.of, ctx.spend, ctx.batch_first = of, spend, batch_first
        spend(measured.seconds[0])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *given, _, _ = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        measured = ctx.of((grads[0].transpose(0, 1) if ctx.batch_first else grads[0]).is_contiguous())
        made = [torch.empty_like(t) if need else None for t, need in zip(given, needed, strict=True)]
        given[0].new_empty(measured.backward_scratch, dtype=torch.uint8)
        ctx.spend(measured.seconds[1])
        return (None, None, None, None, *made)


def recurrent(name: str, work: Work, below: Callable[..., Any], *args: Any) -> Any:
    """A kernel for the op of `OPS` of this name, which is given tensors without data."""
    layer = _Layer.of(name, args)
    if work.machine is None or not args[0].is_meta:
        return below(*args)
    of = None if layer is None else _measured(name, work.machine.whole_layers, layer)
    if layer is None or of is None:
        work.unmeasured.add(f"aten.{name.partition('.')[0]}")
        return below(*args)
    steps, batch = layer.steps_and_batch
    states = layer.tensors[1 : 2 + (len(of(True).types) == 3)]
    width = (2 if layer.options[4] else 1) * states[0].size(-1)
    shapes = ((steps, width) if layer.packed else (steps, batch, width), *(state.shape for state in states))
    out, *last = _Recurrent.apply(of, work.spend, shapes, layer.batch_first, *layer.tensors)
    return (out.transpose(0, 1) if layer.batch_first else out, *last)


def _measured(name: str, known: dict[Hashable, Measured | None], layer: _Layer) -> Callable[[bool], Measured] | None:
    """What says of a call what it needs, told whether backward is given entries one after the other; of too large a
    batch a part is measured."""
    lower = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    needs = tuple(t.requires_grad and torch.is_grad_enabled() for t in layer.tensors)
    steps, batch = layer.steps_and_batch
    weights = sum(t.numel() for t in layer.parameters)
    over = max(6.0 * steps * batch * weights / MOST_FLOPS, 16 * steps * batch * (weights // 8) ** 0.5 / LARGEST)
    each = max(1, int(batch / max(1.0, over)))
    if over > 1 and layer.packed is not None:
        return None
    if each < batch:
        part = layer.x.narrow(0 if layer.batch_first else 1, 0, each)
        layer = layer._replace(x=part, states=tree_map(lambda state: state.narrow(1, 0, each), layer.states))
    modes = _Modes(needs, lower, torch.is_grad_enabled())

    def of(in_order: bool) -> Measured | None:
        call = OpCall(_run, (name, modes, in_order, *layer))
        if call.kind not in known:
            found: list[Measured] = []
            ran = call.run(lambda function: found.extend((function(), function())))
            known[call.kind] = found[-1] if ran else None
        measured = known[call.kind]
        return measured and measured.times(-(-batch // each))

    first = of(True)
    return None if first is None else lambda in_order: first if in_order else of(False) or first


def _run(name: str, modes: _Modes, in_order: bool, *given: Any) -> Measured:
    """in_order: whether backward is given entries one after the other in memory; else it may copy them."""
    layer = _Layer(*given)
    for t, need in zip(layer.tensors, modes.needs, strict=True):
        t.requires_grad_(need)
    trained = [t for t in layer.tensors if t.requires_grad]
    args = layer.args()
    op = operation(f"aten::{name}")
    begin = time.perf_counter()
    with torch.set_grad_enabled(modes.trains), torch.autocast("cpu", modes.lower, enabled=modes.lower is not None):
        results, forward = allocations(lambda: op(*args))
    seconds = time.perf_counter() - begin
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in results}
    kept, most = max(0, sum(forward) - sum(sizes.values())), max(accumulate(forward, initial=0))
    found = Measured(kept, False, most - sum(forward), 0, (seconds, 0.0), tuple(t.dtype for t in results))
    if not trained:
        return found
    one, edge = torch.ones(results[0].shape if in_order else 1, dtype=results[0].dtype), get_gradient_edge(results[0])
    gradient = one.expand(results[0].shape)
    results = [*results]
    _, released = allocations(results.clear)
    begin = time.perf_counter()
    gradients, backward = allocations(lambda: torch.autograd.grad(edge, trained, gradient, allow_unused=True))
    seconds = time.perf_counter() - begin
    most = max(accumulate(backward, initial=0)) - sum(t.nbytes for t in gradients if t is not None)
    return found._replace(
        keeps_output=-sum(released) < sum(sizes.values()),
        backward_scratch=max(0, most),
        seconds=(found.seconds[0], seconds),
    )
