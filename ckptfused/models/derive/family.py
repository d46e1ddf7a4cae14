"""Layers that were derived, as a family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten
from ckptfused.compat.torch_compile import untraced
from ckptfused.layer.facts import elsewhere
from ckptfused.layer.hooks import LENT, lent_weights
from ckptfused.layer.parts import Reason
from ckptfused.layer.spec_text import Mode
from ckptfused.models.cache_arguments import fill, left_empty
from ckptfused.models.derive.calls import HALVES_DIFFER, Ready, forget, held_tensor, outer_tensor, ready, seen
from ckptfused.models.derive.compiled import ready_in_compiler
from ckptfused.models.derive.flash import packed, runs_flash
from ckptfused.models.derive.rules.rotations import still_says_twice
from ckptfused.models.family import FAMILIES, Family, Outcome, family_of, fused_call, register
from ckptfused.models.hugging_face import collecting
from ckptfused.models.steps import Generic, run_steps
from ckptfused.ops.call import Call


class Derived(Family):
    """Layers that nobody wrote an adapter for."""

    name = "derived"

    def as_read(self, layer: Any) -> bool:
        return True

    def run(self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if collecting(layer, _OF_ROUTERS):
            return _ASKED
        given = left_empty(layer, type(layer).forward, args, kwargs)
        if given is None:
            return Reason("a key/value cache is in use", original=True)
        found = self.call(layer, mode, *given)
        if isinstance(found, Reason):
            return found
        made, steps = found
        if collecting(layer) and (len(steps) == 1 or isinstance(steps[0], Generic)):
            return _ASKED
        fill(layer, args, kwargs, next(step.x for step in steps if isinstance(step, Call)))
        return made.result(*run_steps(layer, mode, steps))

    def refuse_original(self, layer: Any, why: str) -> None:
        if (family := family_of(layer)) is not None:
            family.refuse_original(layer, why)

    def call(
        self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: bool = False
    ) -> tuple[Ready, tuple[Call | Generic, ...]] | Reason:
        """What a layer that is called so returns, and its steps, one an op. sharded: as `layer.build_call`."""
        if (why := elsewhere(True)) is not None:  # nothing that is read then may be remembered
            return why
        leaves, tree = tree_flatten((args, kwargs))
        where = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if where is None or leaves[where].dim() != 3 or leaves[where].size(1) < 2:
            return Reason("the layer is not called with x [B, T, C] of two tokens or more")
        held: Any
        if torch.compiler.is_compiling():
            found, held, flash = ready_in_compiler(layer, args, kwargs, where), layer, runs_flash(layer)
        else:
            one = untraced(seen)(layer)
            if isinstance(one, Reason):
                return one
            if one.state.why:
                return Reason(one.state.why)
            found = untraced(ready)(one, layer, (args, kwargs), leaves, tree, where)
            held, flash = one.modules, one.flash
            if (why := one.state.watched(() if isinstance(found, Reason) else found.called(held))) is not None:
                return why
        if isinstance(found, Reason):
            return found
        known: dict[Any, Tensor] = {}
        outer = {
            name: leaves[i] if i >= 0 else outer_tensor(found, held, leaves, name, known) for name, i in found.outer
        }
        if not all(still_says_twice(outer[name], *how) for name, how in found.tables):
            return Reason(HALVES_DIFFER)
        inputs = found.layout.inputs(found.given(leaves), outer)
        if flash and not inputs.seq_first and inputs.masks.mask is None and inputs.masks.padding is None:
            bounds = packed(layer, inputs.x, args, kwargs)
            if isinstance(bounds, Reason):
                return bounds
            inputs = inputs._replace(cu_seqlens=bounds)
        call = fused_call(layer, found.layout.parts(held), inputs, mode, sharded)
        if isinstance(call, Reason) or found.rest is None:
            return call if isinstance(call, Reason) else (found, (call,))
        given = [held_tensor(held, name) if i < 0 else leaves[i] for name, i in found.beside]
        light = found.rest.scales and not any(t.requires_grad for t in given)
        step = Generic(found.why, partial(found.rest.run, layer), tuple(given), saves_nothing=light)
        if lent_weights(layer):
            return LENT
        return found, (step, call) if found.rest.first else (call, step)

    def outcome_of(self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What will become of calls like this one: an `Outcome` or a `Reason`. The layer remembers nothing of it."""
        found = self.call(layer, mode, args, kwargs, sharded=True)
        forget(layer)
        if isinstance(found, Reason):
            return found
        _, steps = found
        return Outcome.of(steps, mode)


_ASKED = Reason("attention weights or router logits are asked for", original=True)
_OF_ROUTERS = ("router_logits",)
"""What modules make that are called beside the op: hooks on them collect it."""
DERIVED = Derived()
if DERIVED.name not in FAMILIES:
    register(DERIVED)
