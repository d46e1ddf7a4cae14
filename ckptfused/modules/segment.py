"""Several blocks behind one saved input, as one autograd function of their ops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused.checks import compute_word
from ckptfused.compat.torch_compile import constant_result, in_graph
from ckptfused.ops import enclosing_checkpoint, numerics
from ckptfused.ops.call import Call, SlotTensors, end_replay
from ckptfused.ops.second_order import apart
from ckptfused.spec import AUX_NAMES, MOST_TEXTS, parse

_ids = itertools.count(-1, -1)


@constant_result
def _fresh_id() -> int:
    """Never the same number twice in one compiled graph; below zero, where no block's own id is."""
    return next(_ids)


class _Step(NamedTuple):
    """One block of a segment: its op, its spec and how many parameter slots it has."""

    op: str
    text: str
    slots: int


def _split(steps: tuple[_Step, ...], tensors: SlotTensors) -> list[tuple[SlotTensors, SlotTensors, Tensor | None]]:
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
    names for as long as its turn takes, then goes back through them. The last keeps nothing: what its backward
    rebuilds of its input is less than its forward.
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
        ctx.settings = numerics.current()
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with numerics.under(ctx.settings):
            return _Segment.replay(ctx, dy)

    @staticmethod
    def replay(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        steps: tuple[_Step, ...] = ctx.steps
        x, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if len(steps) > 1 and torch.is_grad_enabled():
            return (None, *_differentiable_gradients(steps, dy, [x, *tensors], wanted))
        *again, last = steps
        steps, parts = (*again, last._replace(text=_keeping_nothing(last.text))), _split(steps, tensors)
        trails: list[tuple[Tensor, list[Tensor]]] = []
        for step, part in zip(again, parts, strict=False):
            y, *kept = _forward(step, x, *part, True)
            trails.append((x, kept))
            x = y
        trails.append((x, []))
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


@lru_cache(maxsize=MOST_TEXTS)
def _keeping_nothing(text: str) -> str:
    return parse(text).with_keep("inputs").to_string()


@in_graph
def _segment(steps: tuple[_Step, ...], x: Tensor, *tensors: Tensor | None) -> Tensor:
    """A segment's result. torch.compile keeps the call: what Dynamo traces of a Function is differentiated once at
    most, and with the "eager" backend its first derivative has no graph, so that a second one is dropped."""
    return _Segment.apply(steps, x, *tensors)


def _differentiable_gradients(
    steps: tuple[_Step, ...], dy: Tensor, inputs: SlotTensors, wanted: Sequence[bool]
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


def _forward(
    step: _Step, x: Tensor, params: SlotTensors, aux: SlotTensors, state: Tensor | None, save: bool
) -> list[Tensor]:
    return getattr(torch.ops.ckptfused, f"{step.op}_fwd")(x, params, aux, state, step.text, save)


def _backward(
    step: _Step,
    dy: Tensor,
    x: Tensor,
    part: tuple[SlotTensors, SlotTensors, Tensor | None],
    kept: list[Tensor],
    needs: list[bool],
) -> list[Tensor]:
    op, (params, aux, state) = getattr(torch.ops.ckptfused, f"{step.op}_bwd"), part
    return op(dy, x, params, aux, kept, state, step.text, needs)


def run_segment(calls: list[Call], generator: torch.Generator | None) -> Tensor:
    """The last result of calls that follow one another; the x of each but the first is the result before it."""
    x = calls[0].x
    compute = compute_word(x)
    tensors: list[Tensor | None] = []
    steps = []
    for call in calls:
        steps.append(_Step(call.op, call.text + compute, len(call.slots)))
        state = None
        if ".p_" in call.text:
            source = enclosing_checkpoint.source(x, generator)
            state = torch.ops.ckptfused.rng_state(x, _fresh_id(), generator=source)
        tensors += [*call.slots, *call.aux, state]
    end_replay(x, tensors)
    return _segment(tuple(steps), x, *tensors)
