"""Rules for the masks of attention: given ones, in every arrangement, and those by place that a layer makes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptfused.models.derive.recording.in_place import writes
from ckptfused.models.derive.recording.names import function_name, words_of
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.rules.core import Core, Outer
from ckptfused.models.derive.rules.mask_forms import HIDES, arranged, heads_of_mask, seen_by_place
from ckptfused.models.derive.walk import CASTS, Walk, arranges, close

_FLOORS = ("max", "maximum", "clamp", "clamp_min")
_BY_ENTRY = (*CASTS, *words_of("add radd sub rsub mul rmul neg div truediv"))
_LIKE = words_of("zeros_like ones_like full_like new_zeros new_ones new_full")
_NUMBERS = words_of("zeros ones full tensor as_tensor scalar_tensor")
"""Calls that make tensors of numbers, which are held to those of the proof."""
_SAYS = words_of(
    "masked_fill where zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full invert logical_not",
    "bitwise_not eq ne to float double type type_as clone contiguous tensor scalar_tensor",
)
"""Calls that make a mask to be added of a boolean one."""


def mask_steps(walk: Walk, logits: Value, found: Core) -> tuple[Value, Core]:
    """The logits before the masks, which come after everything else."""
    while logits.call is not None:
        call, inputs = logits.call, logits.call.inputs
        if (shown_alone := _shown_alone(walk, logits)) is not None:
            logits, mask = shown_alone
            found = with_mask(walk, found, mask, "keep")
        elif call.op in ("add", "radd") and len(inputs) == 2 and walk.outer(inputs[1]) != walk.outer(inputs[0]):
            logits, mask = inputs if walk.outer(inputs[1]) else inputs[::-1]
            found = with_mask(walk, found, mask, "add")
        elif call.op == "masked_fill" and (hidden := _outer_one(walk, inputs[1])) and _hides(call.given(2, "value")):
            logits = inputs[0]
            found = with_mask(walk, found, hidden, "drop")
        elif call.op == "where" and len(inputs) > 1 and (shown := _outer_one(walk, inputs[0])):
            at, fill = (call.given(i, "") for i in (1, 2))
            value = constant(walk, fill) if isinstance(fill, Value) else fill
            if not isinstance(at, Value) or not _hides(value):
                break
            logits = at
            found = with_mask(walk, found, shown, "keep")
        elif (floored := _floored(walk, logits)) is not None:
            logits = floored
        else:
            break
        walk.take(call, "mask")
        logits = walk.same(logits)
    return logits, found


def _floored(walk: Walk, logits: Value) -> Value | None:
    """Logits before those below a number that hides a key became that number (Baichuan, OPT); None of others."""
    call = logits.call
    if call is None or call.op not in _FLOORS or call.given(2, "max") is not None:
        return None
    at, *others = call.inputs
    least = constant(walk, others[0]) if others else call.given(1, "min")
    return at if len(others) < 2 and at.shape == logits.shape and _hides(least) else None


def _shown_alone(walk: Walk, logits: Value) -> tuple[Value, Value] | None:
    """Logits and a mask of ones and zeros, of logits · mask - large · (1 - mask) (GPT); None of others."""
    call = logits.call
    if call is None or call.op not in ("add", "radd", "sub") or len(call.inputs) != 2:
        return None
    sign = -1 if call.op == "sub" else 1
    for product, added in (call.inputs, call.inputs[::-1])[: 1 if sign < 0 else 2]:
        if product.op not in ("mul", "rmul") or len(product.call.inputs) != 2 or not walk.outer(added):  # type: ignore[union-attr]
            continue
        for at, mask in (product.call.inputs, product.call.inputs[::-1]):  # type: ignore[union-attr]
            if not walk.outer(mask) or walk.outer(at) or mask.shape != added.shape:
                continue
            hidden = mask.data == 0
            by_mask = torch.where(hidden, sign * added.data <= HIDES, (mask.data == 1) & (added.data == 0))
            if bool(by_mask.all()) and _entry_by_entry(walk, added, mask):
                walk.take(product.call, "mask")
                take_all(walk, added)
                return at, mask
    return None


def _entry_by_entry(walk: Walk, v: Value, of: Value) -> bool:
    """Whether each entry of a value is made of that of another and of numbers."""
    queue = [v]
    while queue:
        at = queue.pop()
        if walk.first(at) is walk.first(of):
            continue
        if at.call is None or at.shape != of.shape or at.op not in _BY_ENTRY:
            return False
        queue += at.call.inputs
    return True


def constant(walk: Walk, v: Value) -> float | None:
    """The one number that all entries of a tensor are, whatever the layer is given; None of other tensors."""
    made: list[Recorded] = []
    queue = [v]
    while queue:
        at = queue.pop()
        call = at.call
        if call is None or not (call.op in CASTS or arranges(at) or call.op in (*_NUMBERS, *_LIKE)):
            return None
        if call.op not in CASTS and len(call.inputs) != (call.op not in _NUMBERS):
            return None  # a number that is another tensor's
        made.append(call)
        queue += () if call.op in _LIKE else call.inputs[:1]
    number = v.data.flatten()[0].item() if v.data.numel() else None
    if number is None or not bool((v.data == number).all()):
        return None
    for call in made:
        walk.take(call, "mask")
    return float(number)


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
    if not any(root.startswith("arg:") for root in walk.recording.names_behind(mask)):
        seen = seen_by_place(mask.data, kind, found.ends[3].shape[-2], found.ends[2].shape[-2])
        if walk.same(mask).call is None:
            return _with_outer(walk, found, *_outer(walk, found, walk.same(mask), kind))
        if seen is None and walk.glance(_held, walk, mask):
            return _with_outer(walk, found, _computed(walk, found, mask), kind)
        if seen is None:
            raise RefusedError("a mask of the layer's own that is neither the causal one nor a window", mask.call)
        if found.causal or found.constant is not None:
            raise RefusedError("two masks of the layer's own", mask.call)
        take_all(walk, mask)
        mask = walk.same(mask)
        while mask.op in CASTS and mask.call.inputs[0].data.is_floating_point():  # type: ignore[union-attr]
            mask = mask.call.inputs[0]  # type: ignore[union-attr]  # a cast to another type may be none in a call
        return found._replace(causal=seen[0], window=seen[1], constant=mask, constant_kind=kind)
    try:
        with walk.trial():
            outer, kind = _outer(walk, found, mask, kind)
    except RefusedError:
        outer = _computed(walk, found, mask)
    return _with_outer(walk, found, outer, kind)


def _held(walk: Walk, mask: Value) -> bool:
    """Whether a mask is a part of what the layer holds (ALiBi's), so that it takes no memory of its own."""
    return walk.through(mask, "mask").name.startswith("buffer:")


def _with_outer(walk: Walk, found: Core, outer: Outer, kind: str) -> Core:
    if kind != "add" and walk.recording.roots[outer.name].dtype not in (torch.bool, torch.uint8):
        raise RefusedError("a mask of numbers that multiplies")
    if found.mask is None:
        return found._replace(mask=outer, kind=kind)
    first = found.mask
    if found.padding is None and "padding" in (outer.form, first.form) and outer.form != first.form:
        if outer.form == "padding":
            return found._replace(padding=outer, padding_kind=kind)
        return found._replace(mask=outer, kind=kind, padding=first, padding_kind=found.kind)
    return found._replace(also=(*found.also, (outer, kind)))


def _computed(walk: Walk, found: Core, mask: Value) -> Outer:
    """A mask that the layer computes of arguments alone, so that all layers share it, or a part of what it holds."""
    mask = walk.same(mask)
    if mask.call is None or not all(n.startswith(("arg:", "buffer:")) for n in walk.recording.names_behind(mask)):
        raise RefusedError("a mask of unknown arrangement", mask.call)
    batch, heads, tokens = walk.batch, *found.ends[3].shape[1:3]
    meant = heads_of_mask(mask.data, batch, heads)
    for form, lying in arranged(mask.data, batch, tokens).items():
        sizes = zip(lying.shape, (batch, heads, tokens, found.ends[2].shape[-2]), strict=True)
        if all(n in (1, size) for n, size in sizes) and (form == "padding" or lying.shape == meant.shape):
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
    for form, lying in arranged(root.data, walk.batch, tokens[0]).items():
        for what, made in said.items():
            made = heads_of_mask(made, walk.batch, found.ends[3].shape[1])
            view = lying[..., : made.shape[-1]]
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
    if kind != "add":
        return root, mask.data != 0 if kind == "drop" else mask.data == 0
    hidden = mask.data <= HIDES
    if not bool((mask.data[~hidden] == 0).all()):
        raise RefusedError("the layer computes its mask", mask.call)
    return root, hidden
