"""The tensors of a block: parameter slots, their shapes, and the auxiliary inputs, in the ops' order."""

from __future__ import annotations

from typing import NamedTuple

from .activations import COEFFICIENTS
from .fields import BIASED_NORMS, AttentionSpec, BlockFields, FFNSpec

Shapes = dict[str, tuple[tuple[int, ...], bool]]


class Pair(NamedTuple):
    """Two slots, `<stem>_w` and `<stem>_b`: of the norm that a field names or, without one, of a projection."""

    stem: str
    norm: str | None = None


_FRAME_LAST = (Pair("post", "post"), Pair("out", "out"))
PAIRS: dict[str, tuple[Pair, ...]] = {
    "attn": (
        *(Pair("pre", "pre"), Pair("q"), Pair("k"), Pair("v"), Pair("gate")),
        *(Pair("q_norm", "qk_norm"), Pair("k_norm", "qk_norm"), Pair("o"), *_FRAME_LAST),
    ),
    "ffn": (Pair("pre", "pre"), Pair("gate"), Pair("up"), Pair("down"), *_FRAME_LAST),
}
SINKS = "sinks"
COEFFICIENTS_SLOT = "ffn.coefficients"
MODULATED = ("pre", "post")
"""The norms whose vectors `modulated` gives a row for each batch element."""
PARAM_SLOTS = {name: tuple(f"{pair.stem}_{kind}" for pair in pairs for kind in "wb") for name, pairs in PAIRS.items()}
PARAM_SLOTS["attn"] += (SINKS,)
PARAM_SLOTS["ffn"] += (COEFFICIENTS_SLOT.removeprefix("ffn."),)
PROJECTIONS = {name: tuple(pair.stem for pair in pairs if pair.norm is None) for name, pairs in PAIRS.items()}
PROJECTION_SLOTS = frozenset(f"{name}.{stem}_{kind}" for name in PAIRS for stem in PROJECTIONS[name] for kind in "wb")
ADAPTER_SLOTS = ("a", "b", "bias")
QUANT_SLOTS = ("scale", "offset", "nested_scale", "table")
BATCH = -1
"""In a shape: as many as the batch has elements."""
AUX_NAMES = ("cos", "sin", "mask", "padding", "cu_seqlens", "q_scale")


def param_names(spec: BlockFields) -> tuple[str, ...]:
    """The parameter slots of a block in the order in which the ops take them: `"attn.q_w"`, …

    Then the adapters': `"attn.lora0.a"`, `"attn.lora0.b"`, `"attn.lora0.bias"`, `"attn.lora1.a"`, …; last what stands
    beside quantized weights: `"attn.quant0.scale"`, …
    """
    base = (f"{name}.{slot}" for name in spec.halves for slot in PARAM_SLOTS[name])
    adapters = (f"{prefix}.{slot}" for prefix in spec.adapters for slot in ADAPTER_SLOTS)
    return (*base, *adapters, *(f"{prefix}.{slot}" for prefix in spec.quantized for slot in QUANT_SLOTS))


def quantized_slots(spec: BlockFields) -> frozenset[str]:
    """The slots of weights that are stored in few bits, and of what stands beside them."""
    beside = (f"{prefix}.{slot}" for prefix in spec.quantized for slot in QUANT_SLOTS)
    return frozenset((*(f"{prefix.split('.')[0]}.{q.target}_w" for prefix, q in spec.quantized.items()), *beside))


def shape_in(shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
    """The shape of a slot, of `param_shapes`, in a call with a batch of so many."""
    return shape if BATCH not in shape else tuple(batch if size == BATCH else size for size in shape)


def _half_shapes(name: str, half: AttentionSpec | FFNSpec, width: int) -> Shapes:
    """Norm weights and biases may be left out, but not LayerScale's; LayerNorms and modulated norms have a bias."""
    shapes: Shapes = {}
    products = half.products(width)
    for stem, norm in PAIRS[name]:
        if norm is None:
            if stem in products:
                taken, made = products[stem]
                shapes[f"{name}.{stem}_w"] = ((taken, made) if half.transposed else (made, taken), True)
                shapes[f"{name}.{stem}_b"] = ((made,), False)
            continue
        kind = getattr(half, norm)
        entries = half.normed_width(stem) if isinstance(half, AttentionSpec) and norm == "qk_norm" else width
        own = half.modulated and norm in MODULATED
        shape = (BATCH, entries) if own else (entries,)
        if kind != "none":
            shapes[f"{name}.{stem}_w"] = (shape, kind == "layerscale")
        if kind in BIASED_NORMS or (own and kind not in ("none", "layerscale")):
            shapes[f"{name}.{stem}_b"] = (shape, False)
    if isinstance(half, AttentionSpec) and half.sinks:
        shapes[f"{name}.{SINKS}"] = ((half.heads,), True)
    if isinstance(half, FFNSpec) and half.act in COEFFICIENTS:
        shapes[COEFFICIENTS_SLOT] = ((COEFFICIENTS[half.act],), True)
    return shapes


def param_shapes(spec: BlockFields, width: int) -> Shapes:
    """The slots that a block of this width may fill: name to (shape, whether it must be filled); of quantized weights,
    and of what stands beside them, bytes in place of a shape. A size of `BATCH`: as the call's (`shape_in`)."""
    shapes: Shapes = {}
    for name, half in spec.halves.items():
        shapes |= _half_shapes(name, half, width)
    for prefix, adapter in spec.adapters.items():
        shapes[f"{prefix}.a"] = ((adapter.rank, adapter_input(spec, prefix, width)), True)
        shapes[f"{prefix}.b"] = ((adapter_output(spec, prefix, width), adapter.rank), True)
        shapes[f"{prefix}.bias"] = ((adapter_output(spec, prefix, width),), False)
    for prefix, quantized in spec.quantized.items():
        name = prefix.split(".")[0]
        into, out = spec.halves[name].products(width)[quantized.target]
        for slot, size in quantized.sizes(out, into).items():
            shapes[f"{name}.{quantized.target}_w" if slot == "w" else f"{prefix}.{slot}"] = ((size,), True)
    return shapes


def adapter_input(spec: BlockFields, prefix: str, width: int) -> int:
    """The width of the input of the projection that an adapter stands beside."""
    return spec.halves[prefix.split(".")[0]].products(width)[spec.adapters[prefix].target][0]


def adapter_output(spec: BlockFields, prefix: str, width: int) -> int:
    """The width of the result of that projection."""
    return spec.halves[prefix.split(".")[0]].products(width)[spec.adapters[prefix].target][1]
