"""Second derivatives through a fused layer: backward under `create_graph=True` goes through plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptfused import rng
from ckptfused.functional import has_dropout
from ckptfused.modules.assemble import Call
from ckptfused.outer_checkpoint import captured, default_generator
from ckptfused.reference.block import mask_shapes, reference_block
from ckptfused.spec import BlockSpec, param_names

Gradients = Sequence[Tensor | None]


def run(call: Call) -> Tensor:
    """The call's result, such that what a backward under `create_graph=True` gives can be differentiated.

    There the gradients are computed a second time, from the call's own tensors by plain operations, with the masks
    that the op drew: a copy of the generator as it was before the call draws them again. Not where that would cost
    memory or could not be right: under torch.compile, in the capture of a CUDA graph, and where saved tensors are
    packed (offloaded, replayed). There the op says that it is differentiated once.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _packed() or captured(call.x):
        return call.run()
    before = default_generator(call.x).clone_state() if has_dropout(call.text) else None
    y = call.run()
    if y.grad_fn is not None:
        y.grad_fn.register_hook(_Again(call, before, y.grad_fn.next_functions))
    return y


def _packed() -> bool:
    """Whether somebody packs what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Again:
    """What runs after the op's backward, the checks of which have passed."""

    def __init__(self, call: Call, before: torch.Generator | None, places: Sequence[Any]) -> None:
        self.call: Call | None = call
        self.before = before
        self.places = places
        """Where the op's gradients go: (node, output number)."""
        device = call.x.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def __call__(self, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients | None:
        call, before, dy = self.call, self.before, grad_outputs[0]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.call = self.before = None  # the op has let go of its tensors, and so does this
        if call is None or dy is None or not torch.is_grad_enabled():
            return None
        tensors = list({id(t): t for t in (call.x, *call.slots) if t is not None and t.requires_grad}.values())
        with torch.autocast(*self.autocast):
            y = _plain(call, before)
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


def _plain(call: Call, before: torch.Generator | None) -> Tensor:
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
        masks={} if before is None else _drawn_again(call, spec, before),
    )


def _drawn_again(call: Call, spec: BlockSpec, before: torch.Generator) -> dict[int, Tensor]:
    """The keep masks of the call, by site: by the op, which the reference's Philox is far slower than."""
    batch, tokens = call.x.shape[1::-1] if spec.seq_first else call.x.shape[:2]
    wanted = mask_shapes(spec, batch, tokens, call.x.size(-1), call.cu_seqlens)
    state = rng.state(call.x, before.clone_state())
    return {site: rng.dropout_mask(shape, p, state, site) for site, (p, shape) in wanted.items()}
