"""Layers of which only some halves can be fused: a sequence of fused halves and checkpointed pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused.call import Call
from ckptfused.checkpoint import checkpoint
from ckptfused.convert.family import Family, Plan, fused_call, lacking
from ckptfused.generic.views import entered
from ckptfused.layer.hooks import LENT, lent_weights
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.spec import BlockSpec


class Fused(NamedTuple):
    """A step that is one op. `inputs.x` is what the layer was called with; the op gets the value at hand."""

    parts: Parts
    inputs: Inputs


class Generic(NamedTuple):
    """A step that the layer's own submodules make, checkpointed: `function(x, *args, **kwargs)`.

    It returns the new x, or a tuple that begins with it; the rest goes to `Composite.result`.
    """

    why: str
    """Why it is not fused."""
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


Steps = Sequence[Fused | Generic]


def _checkpointed(step: Generic, x: Tensor) -> Any:
    if not torch.is_grad_enabled() or under_foreign_mode():
        with entered():
            return step.function(x, *step.args, **step.kwargs)
    return checkpoint(same_sdpa(step.function), x, *step.args, **step.kwargs)


class Composite(Family):
    """An adapter whose layers run in steps. Subclasses say `steps`; `parts` holds the halves that can be fused.

    Every step keeps the shape of x, so all ops are known before the first one runs: a layer of which one half turns
    out not to be fusable falls back whole.
    """

    def steps(self, layer: Any, *args: Any, **kwargs: Any) -> Steps | Reason:
        """The steps of a call, or why it has none. Signature as the layer's forward. One step at least is `Fused`."""
        raise NotImplementedError(f"family {self.name!r}: expected an adapter that defines steps(layer, …)")

    def result(self, y: Any, *rest: Any) -> Any:
        """What the layer's forward returns for the last x, and for what the checkpointed pieces returned beside."""
        return y

    def run(self, layer: Any, keep: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps = self._calls(layer, keep, args, kwargs)
        if isinstance(steps, Reason):
            return steps
        x = next(step.x for step in steps if isinstance(step, Call))
        rest: list[Any] = []
        for step in steps:
            if isinstance(step, Call):
                x = step._replace(x=x).run()
                continue
            made = _checkpointed(step, x)
            x, *more = (made,) if isinstance(made, Tensor) else made
            rest += more
        return self.result(x, *rest)

    def plan(self, layer: Any, keep: str, x: Tensor) -> Plan | Reason:
        try:
            args, kwargs = self.example(layer, x)
        except AttributeError as error:
            return lacking(error)
        steps = self._calls(layer, keep, args, kwargs, sharded=True)
        if isinstance(steps, Reason):
            return steps
        why = dict.fromkeys(step.why for step in steps if isinstance(step, Generic))
        specs = tuple(BlockSpec.parse(step.text) for step in steps if isinstance(step, Call))
        return Plan(specs, len(steps) - len(specs), "; ".join(why))

    def _calls(
        self, layer: Any, keep: str, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: bool = False
    ) -> list[Call | Generic] | Reason:
        """The steps, with an op for each fused one. `sharded` as in `layer.build_call`."""
        if not self.as_read(layer):
            return self.unread(layer)
        if lent_weights(layer):
            return LENT
        try:
            steps = self.steps(layer, *args, **kwargs)
        except AttributeError as error:
            return lacking(error)
        if isinstance(steps, Reason):
            return steps
        calls: list[Call | Generic] = []
        for step in steps:
            made = fused_call(*step, keep, sharded) if isinstance(step, Fused) else step
            if isinstance(made, Reason):
                return made
            calls.append(made)
        return calls
