"""Several blocks behind one saved input, and other modules between them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoder, TransformerEncoderLayer

from ckptfused import outer_checkpoint, settings
from ckptfused.checkpoint import checkpoint
from ckptfused.checks import transformed
from ckptfused.double_backward import apart
from ckptfused.functional import compute_word
from ckptfused.layer.call import Call, Slots, learned
from ckptfused.layer.hooks import hooked
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.modules.attention import FusedCheckpointAttention
from ckptfused.modules.block import FusedCheckpointBlock
from ckptfused.modules.ffn import FusedCheckpointFFN
from ckptfused.modules.fused import FusedModule, refuse_generic
from ckptfused.modules.inputs import check_call
from ckptfused.spec import AUX_NAMES
from ckptfused.spec.checks import check_integer

_ids = itertools.count(-1, -1)


@torch.compiler.assume_constant_result
def _fresh_id() -> int:
    """Never the same number twice in one compiled graph; below zero, where no block's own id is."""
    return next(_ids)


class _Step(NamedTuple):
    """One block of a segment: its ops, its spec and how many parameter slots it has."""

    op: str
    text: str
    slots: int


def _split(steps: tuple[_Step, ...], tensors: Slots) -> list[tuple[Slots, Slots, Tensor | None]]:
    """The flat tensors of a segment as (parameters, auxiliary inputs, random state) of each block."""
    parts, start = [], 0
    for step in steps:
        end = start + step.slots
        parts.append((tensors[start:end], tensors[end : end + len(AUX_NAMES)], tensors[end + len(AUX_NAMES)]))
        start = end + len(AUX_NAMES) + 1
    return parts


class _Segment(torch.autograd.Function):
    """Blocks in a row. Saves x, the 16 bytes of each block's random state and what the caller owns.

    Backward runs all blocks but the last again, from the saved states, each keeping what its own `keep`
    names for as long as its turn takes, then goes back through them.
    """

    generate_vmap_rule = True  # for a backward within torch.vmap that is differentiated in its turn

    @staticmethod
    def forward(steps: tuple[_Step, ...], x: Tensor, *tensors: Tensor | None) -> Tensor:
        for step, (params, aux, state) in zip(steps, _split(steps, list(tensors)), strict=True):
            x = _forward(step, x, params, aux, state, False)[0]
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.steps, *tensors = inputs
        ctx.settings = settings.current()
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with settings.under(ctx.settings):
            return _Segment.replay(ctx, dy)

    @staticmethod
    def replay(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        steps: tuple[_Step, ...] = ctx.steps
        x, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if len(steps) > 1 and torch.is_grad_enabled():
            return (None, *_differentiable_gradients(steps, dy, [x, *tensors], wanted))
        parts = _split(steps, tensors)
        trails: list[tuple[Tensor, list[Tensor]]] = []
        for i, (step, part) in enumerate(zip(steps, parts, strict=True)):
            if i + 1 == len(steps) and "keep=" not in step.text:
                trails.append((x, []))
                break
            y, *kept = _forward(step, x, *part, True)
            trails.append((x, kept))
            x = y
        grads: list[Tensor | None] = [None] * len(wanted)
        end = len(wanted)
        for step, part in zip(reversed(steps), reversed(parts), strict=True):
            end -= step.slots + len(AUX_NAMES) + 1
            # The input of this block is wanted by whatever comes before it: x and earlier parameters.
            needs = [any(wanted[:end]), *wanted[end : end + step.slots]]
            x, kept = trails.pop()
            found = iter(_backward(step, dy, x, part, kept, needs))
            if needs[0]:
                dy = next(found)
            for slot in range(step.slots):
                if needs[1 + slot]:
                    grads[end + slot] = next(found)
            if not needs[0]:
                break
        if wanted[0]:
            grads[0] = dy
        return (None, *grads)


@torch.compiler.allow_in_graph
def _segment(steps: tuple[_Step, ...], x: Tensor, *tensors: Tensor | None) -> Tensor:
    """A segment's result. torch.compile keeps the call: what Dynamo traces of a Function is differentiated once at
    most, and with the "eager" backend its first derivative has no graph, so that a second one is dropped."""
    return _Segment.apply(steps, x, *tensors)


def _differentiable_gradients(
    steps: tuple[_Step, ...], dy: Tensor, inputs: Slots, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a segment as functions of dy and its inputs, by way of segments of one block.

    The backward of one block is one op, which has a derivative; the replay of those before it has none.
    """
    variables: list[Any] = [apart(t) if want and t is not None else t for t, want in zip(inputs, wanted, strict=True)]
    y, start = variables[0], 1
    for step in steps:
        end = start + step.slots + len(AUX_NAMES) + 1
        y = _Segment.apply((step,), y, *variables[start:end])
        start = end
    places = [i for i, want in enumerate(wanted) if want]
    found = torch.autograd.grad(y, [variables[i] for i in places], dy, create_graph=True)
    grads: list[Tensor | None] = [None] * len(wanted)
    for i, gradient in zip(places, found, strict=True):
        grads[i] = gradient
    return grads


def _forward(step: _Step, x: Tensor, params: Slots, aux: Slots, state: Tensor | None, save: bool) -> list[Tensor]:
    ops = torch.ops.ckptfused
    if step.op == "block":
        return ops.block_fwd(x, params, aux, state, step.text, save)
    if step.op == "attention_block":
        return ops.attention_block_fwd(x, params, aux, state, step.text, save)
    return ops.ffn_block_fwd(x, params, aux, state, step.text, save)


def _backward(
    step: _Step, dy: Tensor, x: Tensor, part: tuple[Slots, Slots, Tensor | None], kept: list[Tensor], needs: list[bool]
) -> list[Tensor]:
    ops, (params, aux, state) = torch.ops.ckptfused, part
    if step.op == "block":
        return ops.block_bwd(dy, x, params, aux, kept, state, step.text, needs)
    if step.op == "attention_block":
        return ops.attention_block_bwd(dy, x, params, aux, kept, state, step.text, needs)
    return ops.ffn_block_bwd(dy, x, params, aux, kept, state, step.text, needs)


def _run_segment(calls: list[Call], generator: torch.Generator | None) -> Tensor:
    x = calls[0].x
    compute = compute_word(x)
    tensors: list[Tensor | None] = []
    steps = []
    for call in calls:
        steps.append(_Step(call.op, call.text + compute, len(call.slots)))
        state = None
        if ".p_" in call.text:
            source = outer_checkpoint.source(x, generator)
            state = torch.ops.ckptfused.rng_state(x, _fresh_id(), generator=source)
        tensors += [*call.slots, call.cos, call.sin, call.masks.mask, call.masks.padding, call.cu_seqlens, state]
    return _segment(tuple(steps), x, *tensors)


_FORWARDS = (FusedCheckpointBlock.forward, FusedCheckpointAttention.forward, FusedCheckpointFFN.forward)


class FusedCheckpointSequential(nn.Sequential):
    """An `nn.Sequential` whose fused blocks save one input for each of `segments` runs of them.

    Outputs, gradients and dropout masks are, bit for bit, those of the blocks called one by one (but for the
    order in which the gradients of a block that stands in a segment twice are summed). A block's
    `keep` says what the segment's backward keeps of it while it is replayed, so `keep="all"` costs no
    second rebuild and memory only for one segment at a time.
    Other modules, and blocks that cannot be fused just now, run as they are, each checkpointed by itself; the blocks
    before, between and behind them save one input each time. Other modules draw from PyTorch's default generator.

    `segments` is as equal in length as can be, and never more than there are modules: it stays as it is where modules
    come or go; a slice has its share of them, rounded up, a sum both, a product so many times.

    **Shapes** src and the masks as `FusedCheckpointBlock.forward`; all blocks get the same masks, and so do
    `nn.TransformerEncoderLayer` and `nn.TransformerEncoder`; other modules get x alone.
    **Saves** one input for each segment, 16 bytes for each block with dropout; one for each other module.
    **Recomputes** each block's forward but the segment's last, and what `keep` leaves out; other modules whole.
    **Raises** `TypeError` for what is no module, `ValueError` for a count of segments out of range.
    **Source** Chen et al. 2016 (arXiv 1604.06174), section 4; `torch.utils.checkpoint.checkpoint_sequential`.
    """

    def __init__(self, *modules: Any, segments: int = 1) -> None:
        check_integer("segments", segments, 1)
        super().__init__(*modules)
        if len(self) and segments > len(self):
            raise ValueError(f"segments: expected 1 to {len(self)} (the number of modules), got {segments}")
        self.segments = segments

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = OrderedDict(list(self._modules.items())[index])
        return type(self)(part, segments=-(-self.segments * len(part) // len(self)) if part else 1)

    def __add__(self, other: Any) -> FusedCheckpointSequential:
        both = super().__add__(other)  # raises unless other is an nn.Sequential
        segments = self.segments + getattr(other, "segments", 1)
        return FusedCheckpointSequential(*both, segments=min(segments, len(both)) or 1)

    def __mul__(self, times: int) -> FusedCheckpointSequential:
        return FusedCheckpointSequential(*super().__mul__(times), segments=self.segments * times)

    def forward(  # type: ignore[override]
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The last module's output; arguments as `FusedCheckpointBlock.forward`."""
        check_call(src, src_mask, src_key_padding_mask, cu_seqlens, rotary, generator)
        masks = (src_mask, src_key_padding_mask, is_causal)
        singly = src.is_nested or transformed() or learned(masks[:2], rotary or ()) is not None
        runs = self._runs(singly)
        x: Any = src
        for fused, run in runs:
            if not fused:
                x = _call_one(run[0], x, masks, cu_seqlens=cu_seqlens, rotary=rotary, generator=generator)
                continue
            calls = [block.prepare(x, *masks, cu_seqlens, rotary) for block in run]
            with outer_checkpoint.passed(self, len(runs) == 1):
                y = _run_segment(calls, generator)
            x = y.view(x.shape) if x.dim() == 2 else y
        return x

    def _runs(self, singly: bool) -> list[tuple[bool, list[Any]]]:
        """The modules in runs that are one segment (True), and those that are called by themselves."""
        modules, end = list(self), 0
        runs: list[tuple[bool, list[Any]]] = []
        for segment in range(self.segments):
            start, end = end, end + (len(modules) - end) // (self.segments - segment)
            first = len(runs)
            for module in modules[start:end]:
                fused = not singly and _fusable(module)
                if fused and len(runs) > first and runs[-1][0]:
                    runs[-1][1].append(module)
                else:
                    runs.append((fused, [module]))
        return runs

    def insert(self, index: int, module: nn.Module) -> FusedCheckpointSequential:
        """As `nn.Sequential.insert`, which knows no names but numbers: the others keep theirs here."""
        names = list(self._modules)
        if names == [str(i) for i in range(len(names))] or not -len(names) <= index <= len(names):
            return super().insert(index, module)  # type: ignore[return-value]
        self.append(module)
        for name in names[index:] if index != len(names) else ():
            self._modules[name] = self._modules.pop(name)
        return self

    def extra_repr(self) -> str:
        alone = [(name, _why_alone(module)) for name, module in self.named_children()]
        said = ", ".join(f"{name} ({why})" for name, why in alone if why)
        return f"segments={self.segments}" + (f", not in a segment: {said}" if said else "")


def _fusable(module: Any) -> bool:
    """Whether a module can stand in a segment."""
    return _why_alone(module) is None


def _why_alone(module: Any) -> str | None:
    """Why a module cannot stand in a segment: it has no op; or somebody watches it, whom a segment does not call, or
    has it do something else."""
    if not isinstance(module, FusedModule):
        return f"{type(module).__name__} is no fused module"
    if hooked(module) or type(module).forward not in _FORWARDS:
        return "it has a hook or a forward of its own"
    return module.generic_reason()


def _call_one(module: Any, x: Any, masks: tuple[Any, ...], **only_fused: Any) -> Any:
    """A module's result by its own call, with those of the arguments that it takes."""
    if isinstance(module, FusedModule) and not module.takes_masks:
        return module(x, generator=only_fused["generator"])
    if isinstance(module, (FusedModule, FusedCheckpointSequential)):
        return module(x, *masks, **only_fused)
    attends = isinstance(module, (TransformerEncoderLayer, TransformerEncoder))
    if attends:
        refuse_generic(f"{type(module).__name__} does not take them", **only_fused)
    arguments = (x, *masks) if attends else (x,)
    converted = getattr(vars(module).get("forward"), "checkpoints", False)
    if converted or under_foreign_mode() or (isinstance(x, Tensor) and x.is_nested):
        return module(*arguments)
    return checkpoint(same_sdpa(module), *arguments)
