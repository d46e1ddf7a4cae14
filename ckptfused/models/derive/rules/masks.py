"""Rules for the masks of attention: given ones, in every arrangement, and those by place that a layer makes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptfused.layer.mask_patterns import pattern
from ckptfused.models.derive.recording.in_place import writes
from ckptfused.models.derive.recording.names import function_name, words_of
from ckptfused.models.derive.recording.recorder import RefusedError, Value
from ckptfused.models.derive.rules.core import Core, Outer
from ckptfused.models.derive.rules.products import by_heads
from ckptfused.models.derive.walk import Walk, arranges, close

HIDES = -5e8
"""What is added to a logit hides its key from here downwards."""
_OPPOSITE = {"keep": "drop", "drop": "keep"}
_SAYS = words_of(
    "masked_fill where zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full invert logical_not",
    "bitwise_not eq ne to float double type type_as clone contiguous tensor scalar_tensor",
)
"""Calls that make a mask to be added of a boolean one."""


def mask_steps(walk: Walk, logits: Value, found: Core) -> tuple[Value, Core]:
    """The logits before the masks, which come after everything else."""
    while logits.call is not None:
        call, inputs = logits.call, logits.call.inputs
        if call.op in ("add", "radd") and len(inputs) == 2 and walk.outer(inputs[1]) != walk.outer(inputs[0]):
            logits, mask = inputs if walk.outer(inputs[1]) else inputs[::-1]
            found = with_mask(walk, found, mask, "add")
        elif call.op == "masked_fill" and (hidden := _outer_one(walk, inputs[1])) and _hides(call.given(2, "value")):
            logits = inputs[0]
            found = with_mask(walk, found, hidden, "drop")
        elif call.op == "where" and len(inputs) > 1 and (shown := _outer_one(walk, inputs[0])):
            at, fill = (call.given(i, "") for i in (1, 2))
            value = float(fill.data) if isinstance(fill, Value) and fill.data.numel() == 1 else fill
            if not isinstance(at, Value) or isinstance(value, Value) or not _hides(value):
                break
            logits = at
            if isinstance(fill, Value):
                take_all(walk, fill)
            found = with_mask(walk, found, shown, "keep")
        else:
            break
        walk.take(call, "mask")
        logits = walk.same(logits)
    return logits, found


def _outer_one(walk: Walk, mask: Value) -> Value | None:
    """A mask that depends on nothing of the layer's, before it is expanded to the logits' shape; None if it does."""
    if mask.op == "expand_as" and not walk.outer(mask) and walk.outer(mask.call.inputs[0]):  # type: ignore[union-attr]
        walk.take(mask.call, "mask")
        return mask.call.inputs[0]  # type: ignore[union-attr]
    return mask if walk.outer(mask) else None


def _hides(value: Any) -> bool:
    return isinstance(value, int | float) and value <= HIDES


def take_all(walk: Walk, v: Value) -> None:
    """Takes whatever a value comes of."""
    for call in walk.recording.before(v):
        walk.take(call, "mask")


def with_mask(walk: Walk, found: Core, mask: Value, kind: str) -> Core:
    """The core with one more mask, given or the layer's own, or with the two that it is the sum of."""
    if walk.drawn(mask):
        raise RefusedError("a mask that is drawn", mask.call)
    if mask.data.dtype == torch.bool and kind == "add":
        raise RefusedError("a boolean mask is added", mask.call)
    if kind == "add" and mask.op in ("add", "radd") and len(mask.call.inputs) == 2:  # type: ignore[union-attr]
        walk.take(mask.call, "mask")
        for one in mask.call.inputs:  # type: ignore[union-attr]
            found = with_mask(walk, found, walk.same(one), kind)
        return found
    if not any(root.startswith("arg:") for root in _roots(walk, mask)):
        seen = seen_by_place(mask.data, kind, found.ends[3].shape[-2], found.ends[2].shape[-2])
        if seen is None:
            raise RefusedError("a mask of the layer's own that is neither the causal one nor a window", mask.call)
        if found.causal:
            raise RefusedError("two causal masks", mask.call)
        take_all(walk, mask)
        return found._replace(causal=seen[0], window=seen[1], constant=walk.same(mask), constant_kind=kind)
    try:
        with walk.trial():
            outer, kind = _outer(walk, found, mask, kind)
    except RefusedError:
        outer = _computed(walk, found, mask)
    if found.mask is None:
        return found._replace(mask=outer, kind=kind)
    first = found.mask
    if found.padding is None and "padding" in (outer.form, first.form) and outer.form != first.form:
        if outer.form == "padding":
            return found._replace(padding=outer, padding_kind=kind)
        return found._replace(mask=outer, kind=kind, padding=first, padding_kind=found.kind)
    return found._replace(also=(*found.also, (outer, kind)))


def _computed(walk: Walk, found: Core, mask: Value) -> Outer:
    """A mask that the layer computes of arguments alone, so that all layers share it."""
    mask = walk.same(mask)
    if mask.call is None or not all(root.startswith("arg:") for root in _roots(walk, mask)):
        raise RefusedError("a mask of unknown arrangement", mask.call)
    batch, heads, tokens = walk.batch, *found.ends[3].shape[1:3]
    for form, arranged in _arranged(mask.data, batch, tokens).items():
        sizes = zip(arranged.shape, (batch, heads, tokens, found.ends[2].shape[-2]), strict=True)
        if all(n in (1, size) for n, size in sizes):
            walk.take_before("mask", mask)
            return Outer(computed(walk, mask), form)
    raise RefusedError("a mask of unknown arrangement", mask.call)


def named(walk: Walk, v: Value, drawn: bool = False) -> str:
    """The name of a value that the layer is given, or computes of that; drawn: and of numbers that it draws."""
    if not drawn and walk.drawn(v):
        raise RefusedError("what is made once for all layers depends on what is drawn", v.call)
    return v.name if v.call is None else computed(walk, walk.first(v))


def computed(walk: Walk, v: Value) -> str:
    """The name of a value that the layer computes of what stands outside; the recording has it by this name."""
    assert v.call is not None
    for call in walk.recording.before(v):
        if writes(function_name(call.func), {}):
            raise RefusedError("what is computed beside x is written in place", call)
    name = f"call:{v.call.number}.{v.index}"
    walk.recording.roots[name] = v.data
    return name


def _outer(walk: Walk, found: Core, mask: Value, kind: str) -> tuple[Outer, str]:
    """The tensor that a mask is, and what it says."""
    tokens = found.ends[3].shape[-2], found.ends[2].shape[-2]
    root = walk.through(mask, "mask")
    if root.call is None:
        said = {kind: mask.data}
    else:
        root, hidden = _said(walk, mask, kind)
        said = {"drop": hidden, "keep": ~hidden}
    for form, arranged in _arranged(root.data, walk.batch, tokens[0]).items():
        for what, made in said.items():
            made = _by_heads(made, walk.batch, found.ends[3].shape[1])
            view = arranged[..., : made.shape[-1]]
            try:
                shape = torch.broadcast_shapes(view.shape, made.shape)
            except RuntimeError:
                continue
            if close(view.expand(shape), made.expand(shape)):
                return Outer(root.name, form), what
    raise RefusedError("a mask of unknown arrangement", mask.call)


def _said(walk: Walk, mask: Value, kind: str) -> tuple[Value, Tensor]:
    """The one boolean tensor from which the layer computes a mask, and where the mask hides keys."""
    roots: dict[Value, None] = {}
    for call in walk.recording.before(mask):
        if call.op not in _SAYS and not all(map(arranges, call.values)):
            raise RefusedError("the layer computes its mask", call)
        roots.update(dict.fromkeys(v for v in call.inputs if v.call is None))
        walk.take(call, "mask")
    if len(roots) != 1 or (root := next(iter(roots))).data.dtype != torch.bool:
        raise RefusedError("the layer computes its mask", mask.call)
    if mask.data.dtype == torch.bool:
        return root, mask.data if kind == "drop" else ~mask.data
    hidden = mask.data <= HIDES
    if kind != "add" or not bool((mask.data[~hidden] == 0).all()):
        raise RefusedError("the layer computes its mask", mask.call)
    return root, hidden


def _by_heads(mask: Tensor, batch: int, heads: int) -> Tensor:
    """A mask of logits as [B or 1, H or 1, T or 1, T]."""
    if mask.dim() == 3 and mask.shape[0] == batch * heads:
        return by_heads(mask, batch)  # type: ignore[return-value]
    return mask[(None,) * (4 - mask.dim())]


def _arranged(mask: Tensor, batch: int, t: int) -> dict[str, Tensor]:
    """A mask as [B, H, T, T], in every way in which one may be meant."""
    found: dict[str, Tensor] = {}
    if mask.dim() == 4:
        found["full"] = mask
    elif mask.dim() == 3:
        found["batch"] = mask[:, None]
        if mask.shape[0] % batch == 0:
            found["heads"] = mask.unflatten(0, (batch, -1))
        found["by head"] = mask[None]
    elif mask.dim() == 2:
        if tuple(mask.shape) == (t, t):
            found["square"] = mask[None, None]
        if tuple(mask.shape) == (batch, t):
            found["padding"] = mask[:, None, None, :]
    return found


def seen_by_place(mask: Tensor, kind: str, t_q: int, t_k: int) -> tuple[bool, int] | None:
    """Whether a mask hides the keys after each query, and how far a query sees, back or to both sides (0: all the way);
    None where it hides others.
    """
    if mask.dtype == torch.uint8:
        mask = mask.bool()
    if mask.dtype != torch.bool and not (kind == "add" and mask.is_floating_point()):
        return None
    try:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (t_q, t_k)))
    except RuntimeError:
        return None
    if t_q != t_k or mask.shape[-2:] != (t_q, t_k) or not mask.numel():
        return None
    found = pattern(mask.reshape(-1, t_q, t_k), kind)
    return None if found is None or found.padding is not None else (found.causal, found.window)


def _roots(walk: Walk, v: Value) -> set[str]:
    """The names of what a value comes from."""
    names = {v.name} if v.call is None else set()
    for call in walk.recording.before(v):
        names |= {i.name for i in call.inputs if i.call is None}
    return names


def in_rows(mask: Tensor, form: str, batch: int) -> Tensor:
    """A mask that was given in one of the ways of `_arranged`, as [B, H, T, T]."""
    if form == "batch":
        return mask[:, None]
    if form == "by head":
        return mask[None]
    if form == "heads":
        return mask.unflatten(0, (batch, -1))
    if form == "square":
        return mask[None, None]
    return mask[:, None, None, :] if form == "padding" else mask
