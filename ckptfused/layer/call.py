"""From the parts of a layer and the inputs of a call to one op call: the only road to an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.checks import check_dtype, check_packed, check_param, check_plain, check_stored, is_dtensor, rotary_view
from ckptfused.compat.torch_dispatch import is_traceable_wrapper_subclass
from ckptfused.layer.facts import LayerFacts, LayerKey, facts_of
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.layer.spec_text import CallKey, Mode, SpecKey, expected, half_text
from ckptfused.ops.call import Call, SlotTensors
from ckptfused.spec import COEFFICIENTS_SLOT, MOST_TEXTS, PARAM_SLOTS, shape_in

_PLAIN = (Tensor, nn.Parameter)
_OF_TENSORS, _OF_PARAMETERS = Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__  # type: ignore[attr-defined]


def build_call(layer: Parts | LayerFacts, inputs: Inputs, mode: Mode, sharded: bool = False) -> Call | Reason:
    """The op call of a layer, or why it cannot be one.

    layer: its parts, or what `facts_of` says of them. sharded: it is not to run now, and FSDP will have gathered the
    weights when it does.
    """
    if isinstance(layer, Parts):
        found = facts_of(layer, inputs.x.dtype)
        return found if isinstance(found, Reason) else build_call(found, inputs, mode, sharded)
    x, masks, cu_seqlens = inputs.x, inputs.masks, inputs.cu_seqlens
    if x.dim() != 3:
        return Reason(f"the input has shape {list(x.shape)}, expected [B, T, C]")
    key, slots, checks = layer
    cos = sin = None
    if key.attn is not None:
        if (why := _beside_fits(inputs)) is not None:
            return why
        if cu_seqlens is not None:
            check_packed(x, cu_seqlens, masks)
        if key.rope != "none":
            cos, sin = inputs.cos, inputs.sin
            if cos is None or sin is None:
                return Reason("there are no rotary tables")
            if not inputs.own_tables:
                width, (B, T) = key.rotary_dim or cos.size(-1), x.shape[1::-1] if inputs.seq_first else x.shape[:2]
                cos, sin = rotary_view("cos", cos, B, T, width), rotary_view("sin", sin, B, T, width)
    text = text_here(key, inputs, mode)
    modulated, given = "modulated=1" in text, inputs.vectors
    if modulated and not any(name != COEFFICIENTS_SLOT for name in given):
        return Reason("a modulated block is called without modulation", error=ValueError)
    if modulated and x.is_cuda and x.size(0) > 1 and "p_res=" in text:
        return Reason("dropout beside vectors of each batch element has no kernel on a GPU")
    if "act=xielu" in text and COEFFICIENTS_SLOT not in given:
        return Reason("there are no coefficients of the activation", error=ValueError)
    if given:
        slots = _with_vectors(slots, key, given)
    if (why := _misfit(x, slots, text, key.width, key.names, sharded)) is not None:
        return why
    return Call(key.op, x, slots, text, masks, cos, sin, cu_seqlens, inputs.keep_keys, inputs.q_scale, checks)


def _with_vectors(slots: SlotTensors, key: LayerKey, vectors: Mapping[str, Tensor]) -> SlotTensors:
    """The tensors of an op with those that the call gives."""
    names = [
        f"{half}.{slot}" for half in ("attn", "ffn") if getattr(key, half) is not None for slot in PARAM_SLOTS[half]
    ]
    return [*map(vectors.get, names, slots), *slots[len(names) :]]  # type: ignore[arg-type]


def text_here(layer: LayerKey, inputs: Inputs, mode: Mode) -> str:
    """The text of the spec of a layer that is called with these inputs; x is not read."""
    masks = inputs.masks
    called: SpecKey = ()
    if layer.attn is not None:
        rotary = layer.rotary_dim or (0 if inputs.cos is None else inputs.cos.size(-1))
        turned = 0 if layer.rope == "none" or rotary == layer.head_dim else rotary
        key = CallKey(
            mask=masks.kind,
            padding=masks.padding_kind,
            causal=masks.causal,
            packed=inputs.cu_seqlens is not None,
            window=masks.window or (layer.window if inputs.windowed else 0),
            rope=layer.rope,
            rotary_dim=turned,
            q_scale=inputs.q_scale is not None,
        )
        called = tuple(key)
    return half_text(layer.attn, called, layer.ffn, layer.parallel, inputs.seq_first, *mode)


def learned(masks: Sequence[Tensor | None], tables: Sequence[Tensor | None] = ()) -> Reason | None:
    """Why a call with these masks and rotary tables is not fused, where one needs a gradient: it would get none."""
    if torch.is_grad_enabled():
        for what, tensors in (("mask", masks), ("rotary table", tables)):
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return Reason(f"a {what} needs a gradient")
    return None


def _beside_fits(inputs: Inputs) -> Reason | None:
    (mask, _, padding, *_), device = inputs.masks, inputs.x.device
    beside = {"mask": mask, "padding": padding, "cos": inputs.cos, "sin": inputs.sin, "cu_seqlens": inputs.cu_seqlens}
    beside["q_scale"] = inputs.q_scale
    for what, tensor in beside.items():
        if tensor is not None and tensor.device != device:
            return Reason(f"{what}: expected x's device {device}, got {tensor.device}", error=ValueError)
    return None


@lru_cache(maxsize=MOST_TEXTS)
def _fit(text: str, width: int) -> Callable[[Tensor, SlotTensors], bool]:
    """Whether the tensors of a call with this text surely fit."""
    slots = expected(text, width)
    return _C.ExpectedTensors([((), "") if slot is None else (slot.shape, slot.kind) for slot in slots]).fit


def _misfit(
    x: Tensor, slots: SlotTensors, text: str, width: int, names: Mapping[str, str], sharded: bool
) -> Reason | None:
    """The first tensor that does not fit op and input in shape, device, kind or type."""
    if not torch.compiler.is_compiling():
        kinds = {*map(type, slots)}
        if _fit(text, width)(x, slots) and not any(map(_says_itself, kinds)):
            return None
    dtype, device = x.dtype, x.device
    for tensor, slot in zip(slots, expected(text, width), strict=True):
        if tensor is None or slot is None:
            continue
        typed, shape = tensor.dtype == dtype or slot.kind == "norm", shape_in(slot.shape, x.size(0))
        if typed and type(tensor) in _PLAIN and tensor.shape == shape and tensor.device == device:
            continue
        if (why := _misfit_of(x, tensor, slot.kind, shape, _name(slot.name, names), sharded)) is not None:
            return why
    return None


def _misfit_of(x: Tensor, tensor: Tensor, kind: str, shape: tuple[int, ...], name: str, sharded: bool) -> Reason | None:
    if sharded and is_dtensor(tensor):
        return None
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        return Reason(f"{name}: expected a plain tensor, got {type(tensor).__name__}", error=TypeError)
    try:
        check_plain(name, tensor)
        if kind == "stored":
            check_stored(name, tensor, shape[0], x)
            return None
        if type(tensor) not in _PLAIN and _says_itself(type(tensor)):
            return Reason(f"{name}: {type(tensor).__name__} says itself what is computed with it (__torch_function__)")
        check_param(name, tensor, shape, x)
        if kind == "projection" or (kind == "adapter" and tensor.dtype != torch.float32):
            check_dtype(name, tensor, x)
    except (TypeError, ValueError) as error:
        return Reason(str(error), error=type(error))
    return None


@lru_cache(maxsize=MOST_TEXTS)
def _says_itself(kind: type) -> bool:
    """Whether a class itself says what functions make of its tensors."""
    own = getattr(kind, "__torch_function__", _OF_PARAMETERS)
    return getattr(own, "__func__", own) not in (_OF_TENSORS, _OF_PARAMETERS)


def _name(slot: str, names: Mapping[str, str]) -> str:
    """The name of a slot's tensor by the names of the pieces: that of an adapter by itself."""
    if slot in names or ".lora" in slot or ".quant" in slot:
        return names.get(slot, slot)
    piece, _, part = slot.rpartition("_")
    if not piece:  # a tensor by itself, as the sinks are
        return slot.partition(".")[2]
    return f"{names.get(piece, piece.partition('.')[2])}.{'weight' if part == 'w' else 'bias'}"
