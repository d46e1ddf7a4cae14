"""Second derivatives through a fused layer: backward under `create_graph=True` goes through plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ckptfused.functional import MOST_TEXTS
from ckptfused.modules.assemble import Call
from ckptfused.reference.block import reference_block
from ckptfused.spec import BlockSpec, param_names

Gradients = Sequence[Tensor | None]


def differentiable_twice(y: Tensor, call: Call) -> Tensor:
    """y, the result of a call, such that what a backward under `create_graph=True` gives can be differentiated.

    There the gradients are computed a second time, from the call's own tensors by plain operations. Not where that
    would cost memory or could not be right: with dropout, whose masks only the op knows, under torch.compile, and
    where saved tensors are packed (offloaded, replayed). There the op says that it is differentiated once.
    """
    if torch.compiler.is_compiling() or y.grad_fn is None or _packed() or _has_dropout(call.text):
        return y
    y.grad_fn.register_hook(_Again(call, y.grad_fn.next_functions))
    return y


@lru_cache(maxsize=MOST_TEXTS)
def _has_dropout(text: str) -> bool:
    return BlockSpec.parse(text).has_dropout


def _packed() -> bool:
    """Whether somebody packs what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Again:
    """What runs after the op's backward, the checks of which have passed."""

    def __init__(self, call: Call, places: Sequence[Any]) -> None:
        self.call: Call | None = call
        self.places = places
        """Where the op's gradients go: (node, output number)."""
        device = call.x.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def __call__(self, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients | None:
        call, dy = self.call, grad_outputs[0]
        if call is None or dy is None or not torch.is_grad_enabled():
            self.call = None  # the op has let go of its tensors, and so does this
            return None
        tensors = list({id(t): t for t in (call.x, *call.slots) if t is not None and t.requires_grad}.values())
        with torch.autocast(*self.autocast):
            y = _plain(call)
        gradients = torch.autograd.grad(y, tensors, dy, create_graph=True, allow_unused=True)
        found = {}
        for tensor, gradient in zip(tensors, gradients, strict=True):
            edge = torch.autograd.graph.get_gradient_edge(tensor)
            found[edge.node, edge.output_nr] = gradient
        result: list[Tensor | None] = []
        for place, fused in zip(self.places, grad_inputs, strict=True):
            # A tensor that fills two places (tied weights) has its whole gradient in the first.
            again = found.get(place)
            if fused is not None and again is not None:
                found[place] = torch.zeros_like(again)
                fused = again.to(fused.dtype)
            result.append(fused)
        return tuple(result)


def _plain(call: Call) -> Tensor:
    spec = BlockSpec.parse(call.text)
    params: Any = dict(zip(param_names(spec), call.slots, strict=True))
    masks = call.masks
    return reference_block(
        call.x,
        params,
        spec,
        cos=call.cos,
        sin=call.sin,
        mask=masks.mask,
        padding=masks.padding,
        cu_seqlens=call.cu_seqlens,
    )
