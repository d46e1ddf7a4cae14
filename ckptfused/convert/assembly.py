"""From the parts of a layer to one op call."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptfused.checks import is_dtensor
from ckptfused.convert.modules import Norm, Projection, activation, norm, projection, watched
from ckptfused.convert.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.convert.peft import active_copy
from ckptfused.convert.source import as_read, unread
from ckptfused.functional import autocast_enabled, check_packed, rotary_view
from ckptfused.modules.assemble import Call, Slots, canonical_text, input_words, settled
from ckptfused.modules.sdpa import sdpa_replaced
from ckptfused.spec import MAX_HEAD_DIM, BlockSpec, keepable

_PLACES = ("pre", "post", "out")


class Assembled(NamedTuple):
    """A half in the op's terms: its words, its tensors in slot order, and those of its adapters, which come last."""

    words: str
    slots: Slots
    adapters: Slots


def _holders(holders: tuple[nn.Module, ...]) -> Reason | None:
    for holder in (*holders, *map(active_copy, holders)):  # A wrapper of PEFT's hides the module that it runs.
        if (why := watched(holder)) is not None:
            return why
        if not as_read(holder):
            what = unread(type(holder), type(holder).forward)
            return Reason(f"the code of {what} is not the one that was read (see tested versions)")
    return None


def _projections(modules: dict[str, nn.Module | None]) -> dict[str, Projection] | Reason:
    found: dict[str, Projection] = {}
    for name, module in modules.items():
        if module is None:
            continue
        what = projection(module)
        if isinstance(what, Reason):
            return Reason(f"{name}: {what.text}")
        found[name] = what
    if len({p.transposed for p in found.values()}) > 1:
        return Reason("projections stored both [out, in] and [in, out]")
    return found


def _norms(half: str, modules: dict[str, nn.Module | None], x: Tensor) -> dict[str, Norm] | Reason:
    found: dict[str, Norm] = {}
    for place, module in modules.items():
        if module is None:
            continue
        what = norm(module, x)
        if isinstance(what, Reason):
            return what
        found[place] = what
    return found


def _norm_words(half: str, norms: dict[str, Norm]) -> str:
    return "".join(f" {half}.{p}={n.kind} {half}.{p}_eps={settled(n.eps)}" for p, n in norms.items() if p in _PLACES)


def _pair(found: Any) -> Slots:
    return [None, None] if found is None else [found.weight, found.bias]


def _adapters(half: str, maps: dict[str, Projection]) -> tuple[str, Slots]:
    """The word and the tensors of the adapters of a half, in the order of its projections."""
    found = [(place, lora) for place, projection in maps.items() for lora in projection.adapters]
    if not found:
        return "", []
    # No sign in an exponent: + parts two adapters.
    texts = [f"{place}:{lora.a.size(0)}:{settled(lora.scale)}:{settled(lora.p)}" for place, lora in found]
    word = f" {half}.lora={'+'.join(text.replace('e+', 'e') for text in texts)}"
    return word, [tensor for _, lora in found for tensor in (lora.a, lora.b, lora.bias)]


def _heads_fit(a: Attention, maps: dict[str, Projection]) -> Reason | None:
    """Where heads were pruned, the original may count them in the weights, not in the configuration."""
    shared = a.kv_heads * a.head_dim
    widths = {"q": a.heads * a.head_dim + (2 * shared if a.k is None else 0), "k": shared, "v": shared}
    for name, found in maps.items():
        if found.out_features != widths.get(name, found.out_features):
            return Reason(f"{name} has {found.out_features} outputs, {widths[name]} by the number of heads")
    return None


def attention(a: Attention, x: Tensor) -> Assembled | Reason:
    """The attention half, inputs left out."""
    if (why := _holders(a.holders)) is not None:
        return why
    if a.head_dim > MAX_HEAD_DIM:
        return Reason(f"heads are {a.head_dim} wide, kernels reach {MAX_HEAD_DIM}")
    joint = a.k is None
    maps = _projections({"q": a.q, "k": a.k, "v": a.v, "o": a.o})
    if isinstance(maps, Reason):
        return maps
    if (why := _heads_fit(a, maps)) is not None:
        return why
    norms = _norms("attn", {"pre": a.pre, "post": a.post, "out": a.out, "q_norm": a.q_norm, "k_norm": a.k_norm}, x)
    if isinstance(norms, Reason):
        return norms
    words = (
        f" attn.heads={a.heads} attn.kv_heads={a.kv_heads} attn.head_dim={a.head_dim} attn.joint={int(joint)}"
        f" attn.transposed={int(maps['o'].transposed)} attn.p_attn={settled(a.p_attn)} attn.p_res={settled(a.p_res)}"
        f" attn.m={settled(a.m)}"
    ) + _norm_words("attn", norms)
    if a.interleaved:
        words += " attn.interleaved=1"
    if a.scale is not None:
        words += f" attn.scale={settled(a.scale)}"
    if a.softcap:
        words += f" attn.softcap={settled(a.softcap)}"
    if "q_norm" in norms:
        q, k = norms["q_norm"], norms["k_norm"]
        if (q.kind, q.eps) != (k.kind, k.eps):
            return Reason("norms of queries and keys differ in kind or eps")
        words += f" attn.qk_norm={q.kind} attn.qk_eps={settled(q.eps)}"
    places = ["pre", "q", "k", "v", "q_norm", "k_norm", "o", "post", "out"]
    slots = list(chain.from_iterable(_pair(maps.get(p) or norms.get(p)) for p in places))
    word, more = _adapters("attn", maps)
    return Assembled(words + word, slots, more)


def ffn(f: FFN, x: Tensor) -> Assembled | Reason:
    """The FFN half."""
    if (why := _holders(f.holders)) is not None:
        return why
    gated = f.gate is not None
    kind = activation(f.act, gated)
    if isinstance(kind, Reason):
        return kind
    maps = _projections({"gate": f.gate, "up": f.up, "down": f.down})
    if isinstance(maps, Reason):
        return maps
    norms = _norms("ffn", {"pre": f.pre, "post": f.post, "out": f.out}, x)
    if isinstance(norms, Reason):
        return norms
    down = maps["down"]
    words = (
        f" ffn.act={kind} ffn.hidden={down.weight.size(0 if down.transposed else 1)}"
        f" ffn.joint={int(gated and f.up is None)} ffn.transposed={int(down.transposed)}"
        f" ffn.p_hidden={settled(f.p_hidden)} ffn.p_res={settled(f.p_res)} ffn.m={settled(f.m)}"
    ) + _norm_words("ffn", norms)
    places = ["pre", "gate", "up", "down", "post", "out"]
    slots = list(chain.from_iterable(_pair(maps.get(p) or norms.get(p)) for p in places))
    word, more = _adapters("ffn", maps)
    return Assembled(words + word, slots, more)


def _tensors_fit(x: Tensor, slots: Slots, adapters: Slots, sharded: bool) -> Reason | None:
    """Whether op and tensors agree in device, kind and dtype; shapes are checked by the op itself."""
    mixed = autocast_enabled(x)
    for tensor in (x, *slots, *adapters):
        if tensor is None:
            continue
        if sharded and is_dtensor(tensor):
            continue
        if type(tensor) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(tensor):
            return Reason(f"a tensor of type {type(tensor).__name__}")  # in shards, quantised
        if tensor.device != x.device:
            return Reason(f"a weight is on {tensor.device}, the input on {x.device}")
    for tensor in slots:
        if tensor is not None and tensor.dim() > 1 and tensor.dtype != x.dtype and not mixed:
            return Reason(f"weights are {tensor.dtype}, the input is {x.dtype}")
    for tensor in adapters:
        if tensor is not None and tensor.dtype not in (x.dtype, torch.float32) and not mixed:
            return Reason(f"adapters are {tensor.dtype}, the input is {x.dtype}")
    return None


def _closing_norm_fits(parts: Parts, x: Tensor) -> Reason | None:
    """Autocast, but for the CPU's, gives the result of a LayerNorm in float32; a block's has the type of x."""
    if x.device.type in ("cpu", "meta") or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    closing = any(half is not None and half.out is not None for half in (parts.attn, parts.ffn))
    if closing and torch.is_autocast_enabled(x.device.type):
        return Reason(f"autocast makes float32 of the layer's {x.dtype} input in its closing norm")
    return None


@torch.compiler.assume_constant_result
def _names_here(words: str, keep: str) -> str:
    """Of the names that are kept of whole layers, those that one half has."""
    names = keepable(BlockSpec.parse(words))
    return "=" + "+".join(name for name in keep[1:].split("+") if name in names)


def build_call(parts: Parts, inputs: Inputs, keep: str, sharded: bool = False) -> Call | Reason:
    """The op call of a layer, or why it cannot be one.

    sharded: it is not to run now, and FSDP will have gathered the weights when it does.
    """
    x = inputs.x
    if x.dim() != 3:
        return Reason(f"the input has shape {list(x.shape)}, expected [B, T, C]")
    if (why := _closing_norm_fits(parts, x)) is not None:
        return why
    if parts.attn is not None and sdpa_replaced():
        return Reason("F.scaled_dot_product_attention is not PyTorch's own, or a TorchFunctionMode may replace it")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and x.is_inference():
        x = x.clone()  # what was made in inference mode cannot be saved for backward
    slots: Slots = []
    adapters: Slots = []
    words = ""
    halves = []
    for name, half, assemble in (("attn", parts.attn, attention), ("ffn", parts.ffn, ffn)):
        if half is None:
            continue
        made = cast(Any, assemble)(half, x)
        if isinstance(made, Reason):
            return made
        words += made.words
        slots += made.slots
        adapters += made.adapters
        halves.append(name)
    if (why := _tensors_fit(x, slots, adapters, sharded)) is not None:
        return why
    slots += adapters
    cos, sin, cu_seqlens = inputs.cos, inputs.sin, inputs.cu_seqlens
    if parts.attn is not None:
        a = parts.attn
        masks, tables = inputs.masks, (("rotary table", cos), ("rotary table", sin))
        beside = (("mask", masks.mask), ("padding", masks.padding), *tables, ("cu_seqlens", cu_seqlens))
        for what, tensor in beside:
            if tensor is not None and tensor.requires_grad:
                return Reason(f"the {what} needs a gradient")
            if tensor is not None and tensor.device != x.device:
                return Reason(f"the {what} is on {tensor.device}, the input on {x.device}")
        words += input_words(inputs.masks, cu_seqlens is not None)
        windowed = inputs.windowed and inputs.masks.mask is None
        words += f" attn.window={a.window or 0 if windowed else 0}"
        if cu_seqlens is not None:
            check_packed(x, cu_seqlens, inputs.masks)
        if a.rope != "none":
            if cos is None or sin is None:
                return Reason("there are no rotary tables")
            width = a.rotary_dim or cos.size(-1)
            words += f" attn.rope={a.rope} attn.rotary_dim={0 if width == a.head_dim else width}"
            cos, sin = (rotary_view(n, t, x.size(0), x.size(1), width) for n, t in (("cos", cos), ("sin", sin)))
    op = "block" if len(halves) == 2 else "attention_block" if halves == ["attn"] else "ffn_block"
    parallel = "shared" if parts.parallel == "shared" else int(parts.parallel)
    words = f"halves={'+'.join(halves)} parallel={parallel} seq_first={int(inputs.seq_first)}{words}"
    if len(halves) == 1 and keep.startswith("="):
        keep = _names_here(words, keep)
    text = canonical_text(words, keep)
    return Call(op, x, slots, text, inputs.masks, cos, sin, cu_seqlens, inputs.keep_keys)
