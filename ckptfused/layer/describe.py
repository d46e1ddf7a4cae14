"""What a layer is, whatever it is called with: each half as facts for the text of a spec and tensors in slot order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptfused.layer.hooks import EVERYWHERE, hooked_everywhere, watched
from ckptfused.layer.parts import FFN, Attention, Parts, Reason
from ckptfused.layer.peft import active_copy
from ckptfused.layer.projections import NO_NORM, Norm, Projection, activation, norm, projection
from ckptfused.layer.sdpa import sdpa_replaced
from ckptfused.layer.source import as_read, unread
from ckptfused.layer.spec_text import SpecKey, settled
from ckptfused.ops.call import Slots
from ckptfused.spec import MAX_HEAD_DIM


class Half(NamedTuple):
    """A half in the op's terms, its inputs left out: facts for the text, and tensors in slot order."""

    facts: SpecKey
    slots: Slots
    adapters: Slots
    """The tensors of its adapters, which come last of all."""
    width: int
    """Width of its result."""


class Layer(NamedTuple):
    """A layer in the op's terms, its inputs left out."""

    parts: Parts
    attn: Half | None
    ffn: Half | None


def describe(parts: Parts, dtype: torch.dtype) -> Layer | Reason:
    """What the layer is, whatever it is called with, or why the kernels do not compute that. dtype: of x."""
    a, f = parts.attn, parts.ffn
    if hooked_everywhere():
        return EVERYWHERE
    if a is not None and sdpa_replaced():
        return Reason("F.scaled_dot_product_attention is not PyTorch's own, or a TorchFunctionMode may replace it")
    attn = None if a is None else _attention(a, parts, dtype)
    if isinstance(attn, Reason):
        return attn
    ffn = None if f is None else _ffn(f, parts, dtype)
    return ffn if isinstance(ffn, Reason) else Layer(parts, attn, ffn)


def _holders(holders: tuple[nn.Module, ...]) -> Reason | None:
    for given in holders:
        copy = active_copy(given)  # a wrapper of PEFT's hides the module that it runs
        for holder in (given,) if copy is given else (given, copy):
            if (why := watched(holder)) is not None:
                return why
            if not as_read(holder):
                what = unread(type(holder), type(holder).forward)
                return Reason(f"the code of {what} is not the one that was read (see tested versions)")
    return None


def _projections(names: Mapping[str, str], modules: dict[str, Any]) -> dict[str, Projection] | Reason:
    found: dict[str, Projection] = {}
    transposed: set[bool] = set()
    for place, module in modules.items():
        if module is None:
            continue
        name = names.get(place, "")
        what = projection(module, name)
        if isinstance(what, Reason):
            return what if name else what._replace(text=f"{_stem(place)}: {what.text}")
        found[place] = what
        transposed.add(what.transposed)
    return found if len(transposed) == 1 else Reason("projections stored both [out, in] and [in, out]")


def _norms(
    names: Mapping[str, str], width: int, dtype: torch.dtype, modules: dict[str, nn.Module | None]
) -> tuple[Norm, ...] | Reason:
    found: list[Norm] = []
    for place, module in modules.items():
        what = NO_NORM if module is None else norm(module, width, dtype, names.get(place, ""))
        if isinstance(what, Reason):
            return what
        found.append(what)
    return tuple(found)


def _stem(place: str) -> str:
    """`"q"` of `"attn.q"`."""
    return place.partition(".")[2]


def _pair(found: Projection | Norm | None) -> Slots:
    return [None, None] if found is None else [found.weight, found.bias]


def _adapters(maps: dict[str, Projection]) -> tuple[SpecKey, Slots]:
    """The facts and the tensors of the adapters of a half, in the order of its projections."""
    found = [(place, lora) for place, projection in maps.items() for lora in projection.adapters]
    facts = tuple((_stem(place), lora.a.size(0), *_settled(lora.scale, lora.p)) for place, lora in found)
    return facts, [tensor for _, lora in found for tensor in (lora.a, lora.b, lora.bias)]


def _settled(*facts: Any) -> SpecKey:
    return tuple(map(settled, facts)) if torch.compiler.is_compiling() else facts


def _attention(a: Attention, parts: Parts, dtype: torch.dtype) -> Half | Reason:
    names = parts.names
    if (why := _holders(a.holders)) is not None:
        return why
    if a.head_dim > MAX_HEAD_DIM:
        return Reason(f"heads are {a.head_dim} wide, kernels reach {MAX_HEAD_DIM}")
    maps = _projections(names, {"attn.q": a.q, "attn.k": a.k, "attn.v": a.v, "attn.o": a.o})
    if isinstance(maps, Reason):
        return maps
    o = maps["attn.o"]
    width = parts.width or o.out_features
    norms = _norms(names, width, dtype, {"attn.pre": a.pre, "attn.post": a.post, "attn.out": a.out})
    if isinstance(norms, Reason):
        return norms
    turned = _norms(names, a.head_dim, dtype, {"attn.q_norm": a.q_norm, "attn.k_norm": a.k_norm})
    if isinstance(turned, Reason):
        return turned
    (pre, post, out), (q, k) = norms, turned
    if q[:2] != k[:2]:
        kinds = type(a.q_norm).__name__, type(a.k_norm).__name__
        return Reason("q_norm is a {}, k_norm a {}, which are not of one kind and eps".format(*kinds))
    lora, adapters = _adapters(maps)
    facts = _settled(
        *(
            a.heads,
            a.kv_heads,
            a.head_dim,
            a.k is None,
            o.transposed,
            a.interleaved,
            a.scale,
            a.softcap or 0.0,
        ),
        *(a.p_attn, a.p_res, a.m, pre.kind, pre.eps, post.kind, post.eps, out.kind, out.eps, q.kind, q.eps, lora),
    )
    slots = [*_pair(pre), *_pair(maps["attn.q"]), *_pair(maps.get("attn.k")), *_pair(maps.get("attn.v"))]
    slots += [*_pair(q), *_pair(k), *_pair(o), *_pair(post), *_pair(out)]
    return Half(facts, slots, adapters, width)


def _ffn(f: FFN, parts: Parts, dtype: torch.dtype) -> Half | Reason:
    names, gated = parts.names, f.gate is not None
    if (why := _holders(f.holders)) is not None:
        return why
    kind = activation(f.act, gated, names.get("ffn.act", ""))
    if isinstance(kind, Reason):
        return kind
    maps = _projections(names, {"ffn.gate": f.gate, "ffn.up": f.up, "ffn.down": f.down})
    if isinstance(maps, Reason):
        return maps
    down = maps["ffn.down"]
    width = parts.width or down.out_features
    norms = _norms(names, width, dtype, {"ffn.pre": f.pre, "ffn.post": f.post, "ffn.out": f.out})
    if isinstance(norms, Reason):
        return norms
    pre, post, out = norms
    lora, adapters = _adapters(maps)
    facts = _settled(
        *(kind, f.hidden or down.in_features, gated and f.up is None, down.transposed, f.p_hidden, f.p_res, f.m),
        *(pre.kind, pre.eps, post.kind, post.eps, out.kind, out.eps, lora),
    )
    slots = [*_pair(pre), *_pair(maps.get("ffn.gate")), *_pair(maps.get("ffn.up")), *_pair(down)]
    slots += [*_pair(post), *_pair(out)]
    return Half(facts, slots, adapters, width)
