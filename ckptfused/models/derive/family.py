"""Layers that were derived, as a family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten
from ckptfused.layer.parts import Reason
from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.layer.spec_text import Mode
from ckptfused.models.caches import left_empty
from ckptfused.models.derive.calls import Ready, forget, outer_tensor, ready, seen
from ckptfused.models.derive.compiled import ready_in_compiler
from ckptfused.models.family import FAMILIES, Family, Outcome, family_of, fused_call, register
from ckptfused.models.hugging_face import collecting
from ckptfused.offload import follow
from ckptfused.ops.call import Call
from ckptfused.spec import BlockSpec


class Derived(Family):
    """Layers that nobody wrote an adapter for."""

    name = "derived"

    def as_read(self, layer: Any) -> bool:
        return True

    def run(self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if collecting(layer):
            return Reason("attention weights or router logits are asked for", original=True)
        if under_foreign_mode():
            return Reason("a TorchFunctionMode may replace what the layer calls")
        given = left_empty(layer, type(layer).forward, args, kwargs)
        if given is None or (given[0] is not args and not torch.is_grad_enabled()):
            return Reason("a key/value cache is in use", original=True)
        found = self.call(layer, mode, *given)
        if isinstance(found, Reason):
            return found
        made, call = found
        follow(call.x)
        return made.result(call.run())

    def refuse_original(self, layer: Any, why: str) -> None:
        if (family := family_of(layer)) is not None:
            family.refuse_original(layer, why)

    def call(
        self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: bool = False
    ) -> tuple[Ready, Call] | Reason:
        """The op call of a layer that is called so, and what it returns. sharded: as `layer.build_call`."""
        leaves, tree = tree_flatten((args, kwargs))
        where = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if where is None or leaves[where].dim() != 3 or leaves[where].size(1) < 2:
            return Reason("the layer is not called with x [B, T, C] of two tokens or more")
        held: Any
        if torch.compiler.is_compiling():
            found, held = ready_in_compiler(layer, args, kwargs, where), layer
        else:
            one = seen(layer)
            if isinstance(one, Reason):
                return one
            if (why := one.state.watched()) is not None or one.state.why:
                return why or Reason(one.state.why)
            found, held = ready(one, layer, (args, kwargs), leaves, tree, where), one.modules
        if isinstance(found, Reason):
            return found
        outer = {name: leaves[i] if i >= 0 else outer_tensor(found, held, leaves, name) for name, i in found.outer}
        inputs = found.layout.inputs(leaves[found.x], outer)
        call = fused_call(found.layout.parts(held), inputs, mode, sharded)
        return call if isinstance(call, Reason) else (found, call)

    def outcome_of(self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What will become of calls like this one: an `Outcome` or a `Reason`. The layer remembers nothing of it."""
        found = self.call(layer, mode, args, kwargs, sharded=True)
        forget(layer)
        return found if isinstance(found, Reason) else Outcome((BlockSpec.parse(found[1].text),))


DERIVED = Derived()
if DERIVED.name not in FAMILIES:
    register(DERIVED)
