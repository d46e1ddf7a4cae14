"""Which kernels a block will use for an input, and why; what it keeps and what it makes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.checks import check_plain
from ckptfused.explain.result import Explanation, Step
from ckptfused.explain.setting import Setting, name_of
from ckptfused.explain.steps import attention_steps, ffn_steps
from ckptfused.layer.parts import Reason
from ckptfused.modules.fused import FusedModule
from ckptfused.ops.call import Call
from ckptfused.sizes import size
from ckptfused.triton import backend

__all__ = ["Explanation", "Step", "explain"]


def explain(block: FusedModule, x: Tensor, *args: Any, show: bool = True, **kwargs: Any) -> Explanation:
    """Say which kernel each step of `block(x, *args, **kwargs)` and of its backward will use, and why.

    Nothing is computed: the answers come from the functions that choose when the block runs, and from `ckptfused.cost`.
    They are for the present state of the block (training or not, `keep`), of autocast and of grad mode.

    **Shapes** x and the other arguments as `forward` takes them. x on the meta device stands for one on the block's.
    show: print the table, too.
    **Raises** `TypeError` for a module that is no `FusedCheckpointBlock`, `FusedCheckpointAttention` or
    `FusedCheckpointFFN`; otherwise what `forward` raises for these arguments.
    """
    if not isinstance(block, FusedModule):
        raise TypeError(
            "block: expected a FusedCheckpointBlock, FusedCheckpointAttention or FusedCheckpointFFN (of a "
            f"FusedCheckpointSequential: one of its blocks), got {type(block).__name__}"
        )
    check_plain("x", x)
    kwargs.pop("generator", None)
    device = next(block.parameters()).device
    if x.device.type == "meta" and device.type != "meta":
        x = torch.empty((), dtype=x.dtype, device=device).expand(x.shape).requires_grad_(x.requires_grad)
    title = f"{type(block).__name__} on {x.device}, x {list(x.shape)} {name_of(x.dtype)}"
    call = Reason("x is a nested tensor") if x.is_nested else block.prepare(x, *args, **kwargs)
    if isinstance(call, Reason):
        step = Step("everything", "the layers themselves under torch.utils.checkpoint", call.text, "made again")
        found = Explanation(title, (step,), {}, {})
    else:
        found = _fused(title, call)
    if show:
        print(found)
    return found


def _fused(title: str, call: Call) -> Explanation:
    s = Setting(call)
    title += "" if s.dtype == s.x.dtype else f", products in {name_of(s.dtype)}"
    spec, work = s.spec, cost.forward_products(s.spec, *s.dims)
    again = cost.replayed(spec)
    held = {"qkv": ("qkv",), "attention": ("attn",), "proj": ("mid", "proj"), "gu": ("gu",), "down": ("out",)}
    kept = {name: any(value in spec.keep for value in values) for name, values in held.items()}
    after = {name: "made again" if name in again else "kept" if kept[name] else "not needed" for name in held}
    steps = [] if spec.attn is None else attention_steps(s, spec.attn, after)
    steps += [] if spec.ffn is None else ffn_steps(s, spec.ffn, after)

    wanted = (s.x, *(slot for slot in call.slots if slot is not None))
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in wanted)
    if not saves:
        steps = [Step(step.name, step.kernel, step.reason) for step in steps]
        note = "Nothing is saved: no gradient is asked for."
        return Explanation(title, tuple(steps), {}, {}, (note, *_missing(s)))
    saved = {"x": s.x.numel() * s.x.element_size()}
    values = cost.kept_values(spec, *s.dims, s.x.dtype)
    saved |= {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in values.items()}
    if spec.has_dropout:
        saved["random state"] = cost.saved_bytes(spec, *s.dims, s.x.dtype) - sum(saved.values())
    replayed = {name: work[name].flops for name in again}
    return Explanation(title, tuple(steps), saved, replayed, (*_notes(s, replayed), *_missing(s)))


def _notes(s: Setting, replayed: dict[str, int]) -> list[str]:
    total = cost.forward_flops(s.spec, *s.dims) + cost.backward_flops(s.spec, *s.dims)
    share = sum(replayed.values()) / total if total else 0.0
    names = {"qkv": "QKV", "attention": "attention", "proj": "output projection", "gu": "gate/up", "down": "down"}
    made = ", ".join(names[name] for name in replayed) or "no product"
    notes = [f"Made again in backward: {made}; {100 * share:.0f} % of the step's FLOPs."]
    if s.cuda and s.spec.attn is not None and s.attention(s.spec.attn)[0] == "cudnn":
        own = "its own and, for the replay, that of forward" if "attention" in replayed else "its own"
        notes.append(
            "cuDNN's plans are built on the host at a shape's first forward and first backward, once a thread: "
            f"backward's thread builds {own}."
        )
    packed = s.spec.attn is not None and s.spec.attn.packed
    if not packed:
        device = "cuda" if s.cuda else "cpu"
        forward = cost.forward_scratch(s.spec, *s.dims, s.x.dtype, device=device)
        backward = cost.backward_scratch(s.spec, *s.dims, s.x.dtype, device=device)
        notes.append(
            f"Most memory at a time: forward {size(forward, 1)}, backward {size(backward, 1)}, results included."
        )
    return notes


def _missing(s: Setting) -> list[str]:
    """What this call needs and will raise without."""
    if not s.cuda:
        return []
    notes = []
    if not _C.cuda_architectures:
        notes.append("ckptfused was built for the CPU alone: this call will raise on a CUDA device.")
    if s.spec.attn is not None and s.attention(s.spec.attn)[0] == "triton" and not backend.has_triton():
        notes.append("Triton, which attention needs here, is not installed: this call will raise.")
    return notes
