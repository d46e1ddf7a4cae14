"""The steps of a layer's call: ops, and pieces that its own submodules make; and how they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.layer.parts import Inputs, Parts
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.layer.spec_text import Mode
from ckptfused.models.experts.routing import routes_once, run_once
from ckptfused.models.from_input import may_keep_input_alone, run_from_input
from ckptfused.offload import follow
from ckptfused.ops.call import Call
from ckptfused.recompute.held import Held
from ckptfused.recompute.made_again import not_recorded
from ckptfused.recompute.operations import can_be_recorded
from ckptfused.recompute.per_thread_tensors import entered
from ckptfused.spec import MOST_TEXTS, parse
from ckptfused.state.containers import Unseen


class Fused(NamedTuple):
    """A step that is one op. `inputs.x` is what the layer was called with; the op gets the value at hand."""

    parts: Parts
    inputs: Inputs


class Generic(NamedTuple):
    """A step that the layer's own submodules make, checkpointed: `function(x, *args, **kwargs)`.

    It returns the new x, or a tuple that begins with it; the rest goes to `Family.result`.
    """

    why: str
    """Why it is not fused."""
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    saves_nothing: bool = False
    """Whether autograd keeps nothing of it: then it is not checkpointed."""


Steps = Sequence[Fused | Generic]


def checkpointed(layer: nn.Module, step: Generic, x: Tensor) -> Any:
    """What a step of a layer makes of x: it is replayed in backward, but for experts that are ours and their router."""
    if routes_once(layer, x):
        return run_once(layer, x, step.function, x, *step.args, **step.kwargs)
    if not torch.is_grad_enabled() or under_foreign_mode():
        with entered():
            return step.function(x, *step.args, **step.kwargs)
    with not_recorded():
        return checkpoint(same_sdpa(step.function), x, *step.args, **step.kwargs)


def run_steps(layer: nn.Module, mode: Mode, steps: Sequence[Call | Generic]) -> list[Any]:
    """The x that a layer's steps make one after the other, and what its checkpointed pieces returned beside."""
    x = next(step.x for step in steps if isinstance(step, Call))
    alone = len(steps) > 1 and may_keep_input_alone(layer, x)
    if alone and mode.inputs_alone and not routes_once(layer, x):
        steps = _joined(layer, steps)
    if alone and inputs_made_again(steps):
        if mode.inputs_alone:
            return run_from_input(layer, x, [partial(_recorded, layer, step) for step in steps])
        first, *others = steps
        if isinstance(first, Call) and routes_once(layer, x):
            follow(x)
            return run_from_input(layer, first.run(), [partial(_taken, layer, step) for step in others])
    rest: list[Any] = []
    for step in steps:
        follow(x)
        x, *more = _taken(layer, step, x)
        rest += more
    return [x, *rest]


def joined_at_the_end(steps: Sequence[Call | Generic]) -> tuple[Generic, Call] | None:
    """The last two steps, if they are a checkpointed piece and an op that may save nothing: what it reads, the piece
    makes again, and beside that it has weights alone: no masks or tables, as attention has, and no vectors that
    modulate it."""
    *_, piece, op = [None, *steps]
    if not isinstance(op, Call) or not isinstance(piece, Generic) or piece.saves_nothing:
        return None
    half = parse(op.text).ffn if op.op == "ffn_block" else None
    return None if half is None or half.modulated else (piece, op)


def _joined(layer: nn.Module, steps: Sequence[Call | Generic]) -> Sequence[Call | Generic]:
    """The same steps, the last two as one checkpoint where they can be: its replay ends before the op, which is not
    called again."""
    pair = joined_at_the_end(steps)
    if pair is None:
        return steps
    piece, op = pair
    op = op._replace(x=op.x.new_empty(0))  # what the layer was called with is the first step's to keep
    guarded = [Held(t) for t in op.slots if t is not None and type(t) is not nn.Parameter]
    return [*steps[:-2], piece._replace(function=partial(_followed, layer, piece.function, Unseen((op, guarded))))]


def _followed(
    layer: nn.Module, function: Callable[..., Any], held: Unseen, x: Tensor, *args: Any, **kwargs: Any
) -> Sequence[Any]:
    """What an op makes of what a function makes of x, and what that returns beside.

    layer: the checkpoint guards its parameters, the op's among them. held: the op, and what else it reads (weights in
    few bits and what is stored beside, say), of which a replay **raises** what was changed in place.
    """
    op, guarded = held.held
    for one in guarded:
        one.take()
    made = function(x, *args, **kwargs)
    x, *more = (made,) if isinstance(made, Tensor) else made
    return (op._replace(x=x).run(), *more)


def inputs_made_again(steps: Sequence[Call | Generic]) -> int:
    """How many steps save as their input what an attention half made: it is made again with what that half's backward
    needs."""
    count, attended = 0, False
    for step in steps:
        if isinstance(step, Call) or not step.saves_nothing:
            count += attended
            attended = _is_recorded(step)
    return count


def _is_recorded(step: Call | Generic) -> bool:
    """Whether a step is an attention half that can be made again."""
    if not isinstance(step, Call) or step.op != "attention_block":
        return False
    return all(t is None or can_be_recorded(t) for t in (*step.slots, *step.aux))


def _recorded(layer: nn.Module, step: Call | Generic, x: Tensor) -> Sequence[Any]:
    """`_taken`, for what may be made again: an attention half and all that its backward needs, at once; an FFN half,
    which would run a third time, is not, so that its result is kept."""
    if not isinstance(step, Call):
        return _taken(layer, step, x)
    if _is_recorded(step):
        return _taken(layer, step._replace(text=_keeping_all(step.text)), x)
    with not_recorded():
        return _taken(layer, step, x)


def _taken(layer: nn.Module, step: Call | Generic, x: Tensor) -> Sequence[Any]:
    """What a step makes of x, and what it returns beside."""
    if isinstance(step, Call):
        return ((step if step.x is x else step._replace(x=x)).run(),)
    made = step.function(x, *step.args) if step.saves_nothing else checkpointed(layer, step, x)
    return (made,) if isinstance(made, Tensor) else made  # type: ignore[no-any-return]


@lru_cache(maxsize=MOST_TEXTS)
def _keeping_all(text: str) -> str:
    return parse(text).with_keep("all").to_string()
