"""The tensors of a block: parameter slots, their shapes, and the auxiliary inputs, in the ops' order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfused.adapters import adapter_input, adapter_output, adapters_of

if TYPE_CHECKING:
    from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec

PARAM_SLOTS: dict[str, tuple[str, ...]] = {
    "attn": (
        *("pre_w", "pre_b"),
        *("q_w", "q_b", "k_w", "k_b", "v_w", "v_b"),
        *("q_norm_w", "q_norm_b", "k_norm_w", "k_norm_b"),
        *("o_w", "o_b"),
        *("post_w", "post_b", "out_w", "out_b"),
    ),
    "ffn": (
        *("pre_w", "pre_b"),
        *("gate_w", "gate_b", "up_w", "up_b", "down_w", "down_b"),
        *("post_w", "post_b", "out_w", "out_b"),
    ),
}
ADAPTER_SLOTS = ("a", "b", "bias")
AUX_NAMES = ("cos", "sin", "mask", "padding", "cu_seqlens")


def param_names(spec: BlockSpec) -> tuple[str, ...]:
    """The parameter slots of a block in the order in which the ops take them: `"attn.q_w"`, …

    Last the adapters': `"attn.lora0.a"`, `"attn.lora0.b"`, `"attn.lora0.bias"`, `"attn.lora1.a"`, …
    """
    halves = (("attn", spec.attn), ("ffn", spec.ffn))
    base = (f"{n}.{slot}" for n, half in halves if half is not None for slot in PARAM_SLOTS[n])
    return (*base, *(f"{prefix}.{slot}" for prefix in adapters_of(spec) for slot in ADAPTER_SLOTS))


def _norm_shapes(half: AttentionSpec | FFNSpec, width: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Norm weights may be left out; only LayerNorm has a bias."""
    shapes: dict[str, tuple[tuple[int, ...], bool]] = {}
    for place in ("pre", "post", "out"):
        kind = getattr(half, place)
        if kind != "none":
            shapes[f"{place}_w"] = ((width,), False)
        if kind == "layernorm":
            shapes[f"{place}_b"] = ((width,), False)
    return shapes


def _attention_shapes(attn: AttentionSpec, width: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    shapes = _norm_shapes(attn, width)
    if attn.joint:
        products = {"q": attn.qkv_width}
    else:
        products = {"q": attn.q_width, "k": attn.kv_width, "v": attn.kv_width}
    for name, out in products.items():
        shapes[f"{name}_w"] = ((width, out) if attn.transposed else (out, width), True)
        shapes[f"{name}_b"] = ((out,), False)
    for name in ("q_norm", "k_norm"):
        if attn.qk_norm != "none":
            shapes[f"{name}_w"] = ((attn.head_dim,), False)
        if attn.qk_norm == "layernorm":
            shapes[f"{name}_b"] = ((attn.head_dim,), False)
    q_width = attn.q_width
    shapes["o_w"] = ((q_width, width) if attn.transposed else (width, q_width), True)
    shapes["o_b"] = ((width,), False)
    return shapes


def _ffn_shapes(ffn: FFNSpec, width: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    shapes = _norm_shapes(ffn, width)
    if ffn.joint:
        products = {"gate": 2 * ffn.hidden}
    elif ffn.gated:
        products = {"gate": ffn.hidden, "up": ffn.hidden}
    else:
        products = {"up": ffn.hidden}
    for name, out in products.items():
        shapes[f"{name}_w"] = ((width, out) if ffn.transposed else (out, width), True)
        shapes[f"{name}_b"] = ((out,), False)
    shapes["down_w"] = ((ffn.hidden, width) if ffn.transposed else (width, ffn.hidden), True)
    shapes["down_b"] = ((width,), False)
    return shapes


def param_shapes(spec: BlockSpec, width: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The slots that a block of this width may fill: name to (shape, whether it must be filled)."""
    shapes = {}
    if spec.attn is not None:
        shapes.update({f"attn.{k}": v for k, v in _attention_shapes(spec.attn, width).items()})
    if spec.ffn is not None:
        shapes.update({f"ffn.{k}": v for k, v in _ffn_shapes(spec.ffn, width).items()})
    for prefix, adapter in adapters_of(spec).items():
        out = adapter_output(spec, prefix, width)
        shapes[f"{prefix}.a"] = ((adapter.rank, adapter_input(spec, prefix, width)), True)
        shapes[f"{prefix}.b"] = ((out, adapter.rank), True)
        shapes[f"{prefix}.bias"] = ((out,), False)
    return shapes
