"""Rules for attention itself: its core in either spelling, and its masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused.models.derive.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.walk import Walk, arranges, close, ratio

HIDES = -5e8
"""What is added to a logit hides its key from here downwards."""
_LOGITS = frozenset(("mul", "rmul", "div", "truediv", "tanh"))


class Outer(NamedTuple):
    """A tensor from outside: an argument of the forward (`"arg:2"`) or what the layer holds (`"buffer:cos"`)."""

    name: str
    form: str = ""
    """How it is arranged: of masks one of `_MASKS`, of tables one of `_TABLES`."""


class Core(NamedTuple):
    """Attention itself, whichever way it was written."""

    q: Value
    k: Value
    v: Value
    y: Value
    scale: float
    softcap: float = 0.0
    causal: bool = False
    mask: Outer | None = None
    kind: str = "none"
    constant: Value | None = None
    """The causal mask that the layer makes itself, where it does; it has to be one at every length."""
    constant_kind: str = ""
    dropout: Recorded | None = None
    k_turned: bool = False


def core(walk: Walk, y: Value) -> Core:
    """The attention that made a value [B, H, T, D]. **Raises** `RefusedError` where none did."""
    call = y.call
    if call is not None and call.op == "scaled_dot_product_attention":
        return _sdpa(walk, y, call)
    if call is not None and call.op in ("matmul", "bmm", "einsum"):
        return _written_out(walk, y, call)
    raise RefusedError("not attention", call)


def _sdpa(walk: Walk, y: Value, call: Recorded) -> Core:
    q, k, v = (call.given(i, name) for i, name in enumerate(("query", "key", "value")))
    if q.data.dim() != 4:
        raise RefusedError("attention of tensors with other than four dimensions", call)
    walk.take(call, "attention")
    given, scale = call.given(3, "attn_mask"), call.kwargs.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    found = Core(q, k, v, y, scale, causal=bool(call.given(5, "is_causal", False)))
    if given is not None:
        kind = "keep" if given.data.dtype == torch.bool else "add"
        found = _masked(walk, found, given, kind)
    return found._replace(dropout=call if call.mask is not None else None)


def _written_out(walk: Walk, y: Value, call: Recorded) -> Core:
    if call.op == "einsum" or y.data.dim() != 4:
        raise RefusedError(f"no rule takes {call}", call)
    walk.take(call, "attention")
    probs, v = walk.same(call.inputs[0]), call.inputs[1]
    dropped = None
    if probs.call is not None and probs.op == "dropout" and probs.call.mask is not None:
        dropped = probs.call
        walk.take(dropped, "attention")
        probs = walk.same(probs.call.inputs[0])
    soft = probs.call
    if soft is None or soft.op != "softmax" or soft.given(1, "dim") not in (-1, 3):
        raise RefusedError(f"no rule takes {probs}", soft)
    walk.take(soft, "attention")
    logits, found = walk.same(soft.inputs[0]), Core(v, v, v, y, 1.0, dropout=dropped)
    logits, found = _mask_steps(walk, logits, found)
    chain: list[Recorded] = []
    raw = logits
    while raw.call is not None and raw.op in _LOGITS and len(raw.call.inputs) == 1:
        walk.take(raw.call, "attention")
        chain.append(raw.call)
        raw = walk.same(raw.call.inputs[0])
    if raw.op not in ("matmul", "bmm"):
        raise RefusedError(f"no rule takes {raw}", raw.call)
    walk.take(raw.call, "attention")
    scale, cap = _scaled(raw.data, logits.data, [n for c in chain for n in c.numbers], chain)
    q, k = raw.call.inputs  # type: ignore[union-attr]
    return found._replace(q=q, k=k, k_turned=True, scale=scale, softcap=cap)


def _scaled(raw: Tensor, logits: Tensor, numbers: list[Any], chain: list[Recorded]) -> tuple[float, float]:
    """Scale and soft-cap by which logits were made of products."""
    if not chain:
        return 1.0, 0.0
    if all(call.op != "tanh" for call in chain) and (scale := ratio(raw, logits)) is not None:
        return scale, 0.0
    for cap in {abs(float(n)) for n in numbers if isinstance(n, int | float) and n}:
        scale = ratio(raw, torch.atanh(logits / cap) * cap)
        if scale is not None and close(cap * torch.tanh(raw * scale / cap), logits):
            return scale, cap
    raise RefusedError("logits that no scale and soft-cap make", chain[0])


def _mask_steps(walk: Walk, logits: Value, found: Core) -> tuple[Value, Core]:
    """The logits before the masks, which come after everything else."""
    while logits.call is not None:
        call, inputs = logits.call, logits.call.inputs
        if call.op in ("add", "radd") and len(inputs) == 2 and walk.outer(inputs[1]) != walk.outer(inputs[0]):
            logits, mask = inputs if walk.outer(inputs[1]) else inputs[::-1]
            found = _masked(walk, found, mask, "add")
        elif call.op == "masked_fill" and walk.outer(inputs[1]) and _hides(call.given(2, "value")):
            logits = inputs[0]
            found = _masked(walk, found, inputs[1], "drop")
        elif call.op == "where" and len(inputs) > 1 and walk.outer(inputs[0]):
            at, fill = (call.given(i, "") for i in (1, 2))
            value = float(fill.data) if isinstance(fill, Value) and fill.data.numel() == 1 else fill
            if not isinstance(at, Value) or isinstance(value, Value) or not _hides(value):
                break
            logits = at
            if isinstance(fill, Value):
                _take_all(walk, fill)
            found = _masked(walk, found, inputs[0], "keep")
        else:
            break
        walk.take(call, "mask")
        logits = walk.same(logits)
    return logits, found


def _hides(value: Any) -> bool:
    return isinstance(value, int | float) and value <= HIDES


def _take_all(walk: Walk, v: Value) -> None:
    for call in walk.recording.before(v):
        walk.take(call, "mask")


def _masked(walk: Walk, found: Core, mask: Value, kind: str) -> Core:
    """The core with one more mask, given or the layer's own."""
    if mask.data.dtype == torch.bool and kind == "add":
        raise RefusedError("a boolean mask is added", mask.call)
    if not any(root.startswith("arg:") for root in _roots(walk, mask)):
        t_q, t_k = found.y.shape[-2], found.v.shape[-2]
        if not is_causal(mask.data, kind, t_q, t_k):
            raise RefusedError("a mask of the layer's own that is not the causal one", mask.call)
        if found.causal:
            raise RefusedError("two causal masks", mask.call)
        _take_all(walk, mask)
        return found._replace(causal=True, constant=walk.same(mask), constant_kind=kind)
    if found.mask is not None:
        raise RefusedError("two masks", mask.call)
    inverted = 0
    root = walk.same(mask)
    while root.call is not None and (
        arranges(root) or root.op in ("logical_not", "invert", "bitwise_not") or _is_zero(root.call)
    ):
        inverted += not arranges(root)
        walk.take(root.call, "mask")
        root = walk.same(root.call.inputs[0])
    if root.call is not None or (inverted and root.data.dtype != torch.bool):
        raise RefusedError("the layer computes its mask", root.call)
    effective = mask.data if inverted % 2 == 0 else ~mask.data
    batch, t = walk.recording.x.shape[:2]
    for form, arranged in _arranged(root.data, batch, t).items():
        view = arranged[..., : mask.shape[-1]]
        shape = torch.broadcast_shapes(view.shape, effective[(None,) * (4 - effective.dim())].shape)
        if close(view.expand(shape), effective[(None,) * (4 - effective.dim())].expand(shape)):
            if inverted % 2:
                kind = {"keep": "drop", "drop": "keep"}[kind]
            return found._replace(mask=Outer(root.name, form), kind=kind)
    raise RefusedError("a mask of unknown arrangement", mask.call)


def _is_zero(call: Recorded) -> bool:
    return call.op == "eq" and [n for n in call.numbers if n is not False and n != 0] == []


def _arranged(mask: Tensor, batch: int, t: int) -> dict[str, Tensor]:
    """A mask as [B, H, T, T], in every way in which one may be meant."""
    found: dict[str, Tensor] = {}
    if mask.dim() == 4:
        found["full"] = mask
    elif mask.dim() == 3:
        found["batch"] = mask[:, None]
    elif mask.dim() == 2:
        if tuple(mask.shape) == (t, t):
            found["square"] = mask[None, None]
        if tuple(mask.shape) == (batch, t):
            found["padding"] = mask[:, None, None, :]
    return found


def is_causal(mask: Tensor, kind: str, t_q: int, t_k: int) -> bool:
    """Whether a mask hides exactly the keys after each query."""
    hidden = torch.ones(t_q, t_k, dtype=torch.bool).triu(1)
    try:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, hidden.shape))
    except RuntimeError:
        return False
    if kind == "add":
        dropped = mask <= HIDES
        return bool((dropped == hidden).all()) and bool((mask[~dropped] == 0).all())
    if mask.dtype not in (torch.bool, torch.uint8):
        return False
    return bool(((mask.bool() if kind == "drop" else ~mask.bool()) == hidden).all())


def _roots(walk: Walk, v: Value) -> set[str]:
    """The names of what a value comes from."""
    names = {v.name} if v.call is None else set()
    for call in walk.recording.before(v):
        names |= {i.name for i in call.inputs if i.call is None}
    return names
