"""From the parts of a layer and the inputs of a call to one op call: the only road to an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptfused.checks import is_dtensor
from ckptfused.functional import (
    check_dtype,
    check_packed,
    check_param,
    check_plain,
    rotary_view,
    run,
)
from ckptfused.key_values import run_with_keys
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.peft import active_copy
from ckptfused.layer.pieces import NO_NORM, Norm, Projection, activation, norm, projection
from ckptfused.layer.sdpa import sdpa_replaced
from ckptfused.layer.source import as_read, unread
from ckptfused.layer.texts import Expected, Facts, expected, settled, text_of
from ckptfused.masks import NO_MASK, Mask
from ckptfused.spec import MAX_HEAD_DIM

Slots = list[Tensor | None]
_PLAIN = (Tensor, nn.Parameter)


class Call(NamedTuple):
    """The arguments of one block op, checked."""

    op: str
    x: Tensor
    slots: Slots
    text: str
    masks: Mask = NO_MASK
    cos: Tensor | None = None
    sin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    keep_keys: Callable[[Tensor, Tensor], object] | None = None
    """As `Inputs.keep_keys`."""

    def run(self, generator: torch.Generator | None = None) -> Tensor:
        """The block's output."""
        given = self.op, self.x, self.slots, self.text, self.masks, self.cos, self.sin, self.cu_seqlens, generator
        if self.keep_keys is None or torch.is_grad_enabled():
            return run(*given)
        y, k, v = run_with_keys(*given)
        self.keep_keys(k, v)
        return y


class Half(NamedTuple):
    """A half in the op's terms, its inputs left out: facts for the text, and tensors in slot order."""

    facts: Facts
    slots: Slots
    adapters: Slots
    """Those of its adapters, which come last of all."""
    width: int
    """Of its result."""


class Layer(NamedTuple):
    """A layer in the op's terms, its inputs left out."""

    parts: Parts
    attn: Half | None
    ffn: Half | None


def build_call(parts: Parts, inputs: Inputs, keep: str, sharded: bool = False) -> Call | Reason:
    """The op call of a layer, or why it cannot be one.

    sharded: it is not to run now, and FSDP will have gathered the weights when it does.
    """
    layer = describe(parts, inputs.x.dtype)
    return layer if isinstance(layer, Reason) else call_of(layer, inputs, keep, sharded)


def describe(parts: Parts, dtype: torch.dtype) -> Layer | Reason:
    """What the layer is, whatever it is called with, or why the kernels do not compute that. dtype: of x."""
    a, f = parts.attn, parts.ffn
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


def _projections(
    half: str, names: Mapping[str, str], modules: tuple[tuple[str, Any], ...]
) -> dict[str, Projection] | Reason:
    found: dict[str, Projection] = {}
    transposed: set[bool] = set()
    for place, module in modules:
        if module is None:
            continue
        name = names.get(f"{half}.{place}", "")
        what = projection(module, name)
        if isinstance(what, Reason):
            return what if name else what._replace(text=f"{place}: {what.text}")
        found[place] = what
        transposed.add(what.transposed)
    return found if len(transposed) == 1 else Reason("projections stored both [out, in] and [in, out]")


def _norms(
    half: str, names: Mapping[str, str], width: int, dtype: torch.dtype, modules: tuple[tuple[str, Any], ...]
) -> tuple[Norm, ...] | Reason:
    found: list[Norm] = []
    for place, module in modules:
        what = NO_NORM if module is None else norm(module, width, dtype, names.get(f"{half}.{place}", ""))
        if isinstance(what, Reason):
            return what
        found.append(what)
    return tuple(found)


def _pair(found: Projection | Norm | None) -> Slots:
    return [None, None] if found is None else [found.weight, found.bias]


def _adapters(maps: dict[str, Projection]) -> tuple[Facts, Slots]:
    """The facts and the tensors of the adapters of a half, in the order of its projections."""
    found = [(place, lora) for place, projection in maps.items() for lora in projection.adapters]
    facts = tuple((place, lora.a.size(0), *_settled(lora.scale, lora.p)) for place, lora in found)
    return facts, [tensor for _, lora in found for tensor in (lora.a, lora.b, lora.bias)]


def _settled(*facts: Any) -> Facts:
    return tuple(map(settled, facts)) if torch.compiler.is_compiling() else facts


def _attention(a: Attention, parts: Parts, dtype: torch.dtype) -> Half | Reason:
    names = parts.names
    if (why := _holders(a.holders)) is not None:
        return why
    if a.head_dim > MAX_HEAD_DIM:
        return Reason(f"heads are {a.head_dim} wide, kernels reach {MAX_HEAD_DIM}")
    maps = _projections("attn", names, (("q", a.q), ("k", a.k), ("v", a.v), ("o", a.o)))
    if isinstance(maps, Reason):
        return maps
    width = parts.width or maps["o"].out_features
    norms = _norms("attn", names, width, dtype, (("pre", a.pre), ("post", a.post), ("out", a.out)))
    if isinstance(norms, Reason):
        return norms
    turned = _norms("attn", names, a.head_dim, dtype, (("q_norm", a.q_norm), ("k_norm", a.k_norm)))
    if isinstance(turned, Reason):
        return turned
    (pre, post, out), (q, k) = norms, turned
    if q[:2] != k[:2]:
        kinds = type(a.q_norm).__name__, type(a.k_norm).__name__
        return Reason("q_norm is a {}, k_norm a {}, which are not of one kind and eps".format(*kinds))
    lora, adapters = _adapters(maps)
    facts = _settled(
        *(a.heads, a.kv_heads, a.head_dim, a.k is None, maps["o"].transposed, a.interleaved, a.scale, a.softcap or 0.0),
        *(a.p_attn, a.p_res, a.m, pre.kind, pre.eps, post.kind, post.eps, out.kind, out.eps, q.kind, q.eps, lora),
    )
    slots = [*_pair(pre), *_pair(maps["q"]), *_pair(maps.get("k")), *_pair(maps.get("v"))]
    slots += [*_pair(q), *_pair(k), *_pair(maps["o"]), *_pair(post), *_pair(out)]
    return Half(facts, slots, adapters, width)


def _ffn(f: FFN, parts: Parts, dtype: torch.dtype) -> Half | Reason:
    names, gated = parts.names, f.gate is not None
    if (why := _holders(f.holders)) is not None:
        return why
    kind = activation(f.act, gated, names.get("ffn.act", ""))
    if isinstance(kind, Reason):
        return kind
    maps = _projections("ffn", names, (("gate", f.gate), ("up", f.up), ("down", f.down)))
    if isinstance(maps, Reason):
        return maps
    down = maps["down"]
    width = parts.width or down.out_features
    norms = _norms("ffn", names, width, dtype, (("pre", f.pre), ("post", f.post), ("out", f.out)))
    if isinstance(norms, Reason):
        return norms
    pre, post, out = norms
    lora, adapters = _adapters(maps)
    facts = _settled(
        *(kind, f.hidden or down.in_features, gated and f.up is None, down.transposed, f.p_hidden, f.p_res, f.m),
        *(pre.kind, pre.eps, post.kind, post.eps, out.kind, out.eps, lora),
    )
    slots = [*_pair(pre), *_pair(maps.get("gate")), *_pair(maps.get("up")), *_pair(down), *_pair(post), *_pair(out)]
    return Half(facts, slots, adapters, width)


def call_of(layer: Layer, inputs: Inputs, keep: str, sharded: bool = False) -> Call | Reason:
    """The op call of a layer with these inputs. sharded: as `build_call`."""
    x, masks, cu_seqlens = inputs.x, inputs.masks, inputs.cu_seqlens
    if x.dim() != 3:
        return Reason(f"the input has shape {list(x.shape)}, expected [B, T, C]")
    a, (attn, ffn) = layer.parts.attn, (layer.attn, layer.ffn)
    cos = sin = None
    if a is not None:
        if (why := _beside_fits(inputs)) is not None:
            return why
        if cu_seqlens is not None:
            check_packed(x, cu_seqlens, masks)
        if a.rope != "none":
            cos, sin = inputs.cos, inputs.sin
            if cos is None or sin is None:
                return Reason("there are no rotary tables")
            if not inputs.own_tables:
                width, (B, T) = a.rotary_dim or cos.size(-1), x.shape[1::-1] if inputs.seq_first else x.shape[:2]
                cos, sin = rotary_view("cos", cos, B, T, width), rotary_view("sin", sin, B, T, width)
    text = text_here(layer, inputs, keep)
    halves = [half for half in (attn, ffn) if half is not None]
    slots = [tensor for half in halves for tensor in half.slots] + [t for half in halves for t in half.adapters]
    if (why := _misfit(x, slots, text, halves[-1].width, layer.parts.names, sharded)) is not None:
        return why
    op = "block" if len(halves) == 2 else "ffn_block" if attn is None else "attention_block"
    return Call(op, x, slots, text, masks, cos, sin, cu_seqlens, inputs.keep_keys)


def text_here(layer: Layer, inputs: Inputs, keep: str) -> str:
    """The text of the spec of a layer that is called with these inputs; x is not read."""
    a, (attn, ffn), masks = layer.parts.attn, (layer.attn, layer.ffn), inputs.masks
    called: Facts = ()
    if a is not None:
        window = a.window if inputs.windowed and a.window else 0
        rotary = a.rotary_dim or (0 if inputs.cos is None else inputs.cos.size(-1))
        called = (masks.kind, masks.padding_kind, masks.causal, inputs.cu_seqlens is not None, window)
        called += (a.rope, 0 if a.rope == "none" or rotary == a.head_dim else rotary)
    facts = None if attn is None else attn.facts, called, None if ffn is None else ffn.facts
    return text_of(*facts, layer.parts.parallel, inputs.seq_first, keep)


def learned(masks: Sequence[Tensor | None], tables: Sequence[Tensor | None] = ()) -> Reason | None:
    """Why a call with these masks and rotary tables is not fused, where one needs a gradient: it would get none."""
    if torch.is_grad_enabled():
        for what, tensors in (("mask", masks), ("rotary table", tables)):
            if any(tensor is not None and tensor.requires_grad for tensor in tensors):
                return Reason(f"a {what} needs a gradient")
    return None


def _beside_fits(inputs: Inputs) -> Reason | None:
    masks, device = inputs.masks, inputs.x.device
    beside = (masks.mask, masks.padding, inputs.cos, inputs.sin, inputs.cu_seqlens)
    for what, tensor in zip(("mask", "padding", "cos", "sin", "cu_seqlens"), beside, strict=True):
        if tensor is not None and tensor.device != device:
            return Reason(f"{what}: expected x's device {device}, got {tensor.device}", error=ValueError)
    return None


def _misfit(x: Tensor, slots: Slots, text: str, width: int, names: Mapping[str, str], sharded: bool) -> Reason | None:
    """The first tensor that does not fit op and input in shape, device, kind or type."""
    dtype, device = x.dtype, x.device
    for tensor, slot in zip(slots, expected(text, width), strict=True):
        if tensor is None or slot is None:
            continue
        typed = tensor.dtype == dtype or slot.kind == "norm"
        if typed and type(tensor) in _PLAIN and tensor.shape == slot.shape and tensor.device == device:
            continue
        if (why := _misfit_of(x, tensor, slot, _name(slot.name, names), sharded)) is not None:
            return why
    return None


def _misfit_of(x: Tensor, tensor: Tensor, slot: Expected, name: str, sharded: bool) -> Reason | None:
    if sharded and is_dtensor(tensor):
        return None
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        return Reason(f"{name}: expected a plain tensor, got {type(tensor).__name__}", error=TypeError)
    try:
        check_plain(name, tensor)
        check_param(name, tensor, slot.shape, x)
        if slot.kind == "projection" or (slot.kind == "adapter" and tensor.dtype != torch.float32):
            check_dtype(name, tensor, x)
    except (TypeError, ValueError) as error:
        return Reason(str(error), error=type(error))
    return None


def _name(slot: str, names: Mapping[str, str]) -> str:
    """The name of a slot's tensor by the names of the pieces: that of an adapter by itself."""
    if slot in names or ".lora" in slot:
        return names.get(slot, slot)
    piece, _, part = slot.rpartition("_")
    return f"{names.get(piece, piece.partition('.')[2])}.{'weight' if part == 'w' else 'bias'}"
