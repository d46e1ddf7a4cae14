"""What a layer is, whatever it is called with: each half as a key of its spec's text, and tensors in slot order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ckptfused.compat.torch_modules import replaced_function
from ckptfused.layer.hooks import EVERYWHERE, hooked_everywhere, watched
from ckptfused.layer.parts import FFN, Attention, Parts, Reason
from ckptfused.layer.peft import active_copy
from ckptfused.layer.projections import NO_NORM, Norm, Projection, activation, norm, projection
from ckptfused.layer.sdpa import sdpa_replaced
from ckptfused.layer.source import as_read, unread
from ckptfused.layer.spec_text import AttentionKey, FFNKey, SpecKey, settled
from ckptfused.ops.call import SlotTensors
from ckptfused.spec import MAX_HEAD_DIM
from ckptfused.spec.slots import PAIRS

SDPA_REPLACED = Reason("F.scaled_dot_product_attention is not PyTorch's own, or a TorchFunctionMode may replace it")


class HalfFacts(NamedTuple):
    """A half in the op's terms, its inputs left out: a key of its text, and tensors in slot order."""

    key: SpecKey
    slots: SlotTensors
    adapters: SlotTensors
    """The tensors of its adapters, which come after both halves' slots."""
    quantized: SlotTensors
    """What stands beside its weights in few bits, which comes last of all."""
    checks: tuple[Callable[[], None], ...]
    """Its part of `LayerFacts.checks`."""
    width: int
    """Width of its result."""


class LayerKey(NamedTuple):
    """What a layer is, whatever it is called with and whatever its tensors hold. It holds no module and no tensor."""

    attn: SpecKey | None
    ffn: SpecKey | None
    width: int
    """C."""
    parallel: bool | Literal["shared"]
    names: Mapping[str, str]
    """Names of pieces as `Parts` has them; the four below are its attention half's."""
    rope: str = "none"
    rotary_dim: int = 0
    head_dim: int = 0
    window: int = 0

    @property
    def op(self) -> str:
        """The op that it is a call of."""
        return "ffn_block" if self.attn is None else "attention_block" if self.ffn is None else "block"


class LayerFacts(NamedTuple):
    """A layer in the op's terms, its inputs left out."""

    key: LayerKey
    slots: SlotTensors
    """All tensors of the op but those of a call, in its order."""
    checks: tuple[Callable[[], None], ...] = ()
    """For before its backward: that its weights in few bits are still those of the forward."""


def facts_of(parts: Parts, dtype: torch.dtype) -> LayerFacts | Reason:
    """What the layer is, whatever it is called with, or why the kernels do not compute that. dtype: of x."""
    a, f = parts.attn, parts.ffn
    if (why := elsewhere(a is not None)) is not None:
        return why
    attn = None if a is None else _attention(a, parts, dtype)
    if isinstance(attn, Reason):
        return attn
    ffn = None if f is None else _ffn(f, parts, dtype)
    if isinstance(ffn, Reason):
        return ffn
    halves = [half for half in (attn, ffn) if half is not None]
    slots = [t for group in ("slots", "adapters", "quantized") for half in halves for t in getattr(half, group)]
    key = LayerKey(
        None if attn is None else attn.key,
        None if ffn is None else ffn.key,
        halves[-1].width,
        parts.parallel,
        parts.names,
        *(() if a is None else (a.rope, a.rotary_dim, a.head_dim, a.window or 0)),
    )
    return LayerFacts(key, slots, tuple(check for half in halves for check in half.checks))


def elsewhere(attends: bool) -> Reason | None:
    """Why no layer is fused just now, whatever it is. attends: it is asked for one with attention."""
    if hooked_everywhere():
        return EVERYWHERE
    if attends and sdpa_replaced():
        return SDPA_REPLACED
    if (name := replaced_function()) is not None:
        return Reason(f"F.{name} is not PyTorch's own")
    return None


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


def _projections(
    names: Mapping[str, str], half: str, dtype: torch.dtype, modules: dict[str, Any]
) -> dict[str, Projection] | Reason:
    """What projections are, by the stems of their slots."""
    found: dict[str, Projection] = {}
    transposed: set[bool] = set()
    for stem, module in modules.items():
        if module is None:
            continue
        name = names.get(f"{half}.{stem}", "")
        what = projection(module, name, dtype)
        if isinstance(what, Reason):
            return what if name else what._replace(text=f"{stem}: {what.text}")
        found[stem] = what
        transposed.add(what.transposed)
    return found if len(transposed) == 1 else Reason("projections stored both [out, in] and [in, out]")


def _norms(
    names: Mapping[str, str], half: str, width: int, dtype: torch.dtype, modules: dict[str, nn.Module | None]
) -> dict[str, Norm] | Reason:
    found: dict[str, Norm] = {}
    for stem, module in modules.items():
        what = NO_NORM if module is None else norm(module, width, dtype, names.get(f"{half}.{stem}", ""))
        if isinstance(what, Reason):
            return what
        found[stem] = what
    return found


_STEMS = {name: tuple(pair.stem for pair in pairs) for name, pairs in PAIRS.items()}
_NOTHING = Projection(None, None)  # type: ignore[arg-type]


def _slots(half: str, found: Mapping[str, Projection | Norm]) -> SlotTensors:
    """The tensors of a half, by the stems of their slots, in the order of the op."""
    pieces = [found.get(stem, _NOTHING) for stem in _STEMS[half]]
    return [tensor for piece in pieces for tensor in (piece.weight, piece.bias)]


def _adapters(maps: dict[str, Projection]) -> tuple[SpecKey, SlotTensors]:
    """What the text says of the adapters of a half, and their tensors, in the order of its projections."""
    found = [(stem, lora) for stem, projection in maps.items() for lora in projection.adapters]
    if not found:
        return (), []
    said = tuple((stem, lora.a.size(0), *_settled((lora.scale, lora.p))) for stem, lora in found)
    return said, [tensor for _, lora in found for tensor in (lora.a, lora.b, lora.bias)]


def _quantized(maps: dict[str, Projection]) -> tuple[SpecKey, SlotTensors, tuple[Callable[[], None], ...]]:
    """What the text says of the weights of a half that are in few bits, the tensors beside them, and their checks."""
    found = [(stem, projection.stored) for stem, projection in maps.items() if projection.stored is not None]
    said = tuple((stem, *stored.form) for stem, stored in found)
    checks = tuple(stored.check for _, stored in found if stored.check is not None)
    return said, [tensor for _, stored in found for tensor in stored.state], checks


def _settled(values: SpecKey) -> SpecKey:
    return tuple(map(settled, values)) if torch.compiler.is_compiling() else values


def _attention(a: Attention, parts: Parts, dtype: torch.dtype) -> HalfFacts | Reason:
    names = parts.names
    if (why := _holders(a.holders)) is not None:
        return why
    if a.head_dim > MAX_HEAD_DIM:
        return Reason(f"heads are {a.head_dim} wide, kernels reach {MAX_HEAD_DIM}")
    maps = _projections(names, "attn", dtype, {"q": a.q, "k": a.k, "v": a.v, "gate": a.gate, "o": a.o})
    if isinstance(maps, Reason):
        return maps
    o = maps["o"]
    width = parts.width or o.out_features
    norms = _norms(names, "attn", width, dtype, {"pre": a.pre, "post": a.post, "out": a.out})
    if isinstance(norms, Reason):
        return norms
    turned: dict[str, Norm] = {}
    row = {"q_norm": a.heads, "k_norm": a.kv_heads} if a.qk_place == "row" else {}
    for stem, module in (("q_norm", a.q_norm), ("k_norm", a.k_norm), ("v_norm", a.v_norm)):
        found = _norms(names, "attn", a.head_dim * row.get(stem, 1), dtype, {stem: module})
        if isinstance(found, Reason):
            return found
        turned |= found
    q, k, v = turned["q_norm"], turned["k_norm"], turned.pop("v_norm")
    if v.weight is not None or v.bias is not None:
        return Reason("v_norm has weights, kernels take a norm of v without")
    if q[:2] != k[:2]:
        kinds = type(a.q_norm).__name__, type(a.k_norm).__name__
        return Reason("q_norm is a {}, k_norm a {}, which are not of one kind and eps".format(*kinds))
    (lora, adapters), (quant, quantized, checks) = _adapters(maps), _quantized(maps)
    key = AttentionKey(
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        joint=a.k is None,
        transposed=o.transposed,
        interleaved=a.interleaved,
        scale=a.scale,
        softcap=a.softcap or 0.0,
        p_attn=a.p_attn,
        qk_norm=q.kind,
        qk_eps=q.eps,
        qk_place=a.qk_place if a.q_norm is not None else "head",
        v_norm=v.kind,
        v_eps=v.eps,
        sinks=a.sinks is not None,
        output_gate=a.output_gate,
        gate_in_q=a.output_gate != "none" and a.gate is None,
        **_frame(a, norms, lora, quant),
    )
    slots = [*_slots("attn", {**maps, **norms, **turned}), a.sinks]
    return HalfFacts(_settled(key), slots, adapters, quantized, checks, width)


def _ffn(f: FFN, parts: Parts, dtype: torch.dtype) -> HalfFacts | Reason:
    names, gated = parts.names, f.gate is not None
    if (why := _holders(f.holders)) is not None:
        return why
    kind = activation(f.act, gated, names.get("ffn.act", ""))
    if isinstance(kind, Reason):
        return kind
    maps = _projections(names, "ffn", dtype, {"gate": f.gate, "up": f.up, "down": f.down})
    if isinstance(maps, Reason):
        return maps
    down = maps["down"]
    width = parts.width or down.out_features
    norms = _norms(names, "ffn", width, dtype, {"pre": f.pre, "post": f.post, "out": f.out})
    if isinstance(norms, Reason):
        return norms
    (lora, adapters), (quant, quantized, checks) = _adapters(maps), _quantized(maps)
    key = FFNKey(
        act=kind,
        hidden=f.hidden or down.in_features,
        joint=gated and f.up is None,
        transposed=down.transposed,
        p_hidden=f.p_hidden,
        **_frame(f, norms, lora, quant),
    )
    slots = [*_slots("ffn", {**maps, **norms}), None]  # the call gives coefficients
    return HalfFacts(_settled(key), slots, adapters, quantized, checks, width)


def _frame(half: Attention | FFN, norms: dict[str, Norm], lora: SpecKey, quant: SpecKey) -> dict[str, Any]:
    """What both halves' keys say of the frame around them."""
    pre, post, out = norms["pre"], norms["post"], norms["out"]
    kinds = {"pre": pre.kind, "pre_eps": pre.eps, "post": post.kind, "post_eps": post.eps}
    beside = {"lora": lora, "quant": quant, "residual": half.residual, "modulated": half.modulated}
    return {**kinds, "out": out.kind, "out_eps": out.eps, "p_res": half.p_res, "m": half.m, **beside}
