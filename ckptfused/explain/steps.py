"""The steps of a block's two halves, in their order."""

from __future__ import annotations

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.explain.result import Step
from ckptfused.explain.setting import ATTENTION, Setting, name_of
from ckptfused.spec import AttentionSpec, FFNSpec


def _norm(kind: str, modulated: bool = False) -> str:
    name = {
        "layernorm": "LayerNorm",
        "rmsnorm": "RMSNorm",
        "gemma": "RMSNorm with 1 + w",
        "layernorm1p": "LayerNorm with 1 + w",
        "layerscale": "LayerScale",
    }[kind]
    return f"{name}, each batch element by its own vectors" if modulated else name


def attention_steps(s: Setting, a: AttentionSpec, after: dict[str, str]) -> list[Step]:
    steps = []
    product, why = s.product()
    if a.pre != "none":
        steps.append(Step("norm before attention", s.rows, _norm(a.pre, a.modulated), "made again"))
    steps.append(Step("QKV product", product, why, after["qkv"]))
    steps += _adapters(s, a, ("q", "k", "v", "gate"), after["qkv"])
    turned = ["q/k norm"] * (a.qk_norm != "none") + [f"RoPE ({a.rope})"] * (a.rope != "none")
    turned = turned[::-1] if a.qk_place == "turned" else turned
    turned += ["v norm"] * (a.v_norm != "none") + ["q by position"] * a.q_scale
    if turned:
        steps.append(Step("q, k", s.rows, " and ".join(turned), "made again"))
    name, reason = s.attention(a)
    steps.append(Step("attention", ATTENTION[name], reason, after["attention"]))
    if a.output_gate != "none":
        gate = f"o times sigmoids, one of each {a.output_gate}, in one pass"
        steps.append(Step("output gate", s.rows, gate, "made again with its gradient"))
    steps.append(Step("output projection", product, why, after["proj"]))
    steps += _adapters(s, a, ("o",), after["proj"])
    return [*steps, *_residual(s, "attention", a)]


def _adapters(s: Setting, half: AttentionSpec | FFNSpec, targets: tuple[str, ...], after: str) -> list[Step]:
    """The adapters beside a product, if there are any."""
    found = [adapter for adapter in half.lora if adapter.target in targets]
    if not found:
        return []
    acc = name_of(cost.accumulation_type(s.x.dtype))
    parts = [f"{a.target}: rank {a.rank}" + (f", dropout {a.p:g}" if a.p else "") for a in found]
    names = ", ".join(dict.fromkeys(adapter.target for adapter in found))
    kernel = "PyTorch's products" if s.cuda else "blocks of rows"
    return [Step(f"adapters of {names}", kernel, f"{'; '.join(parts)}; in {acc}, rounded once", after)]


def _residual(s: Setting, half: str, spec: AttentionSpec | FFNSpec) -> list[Step]:
    """The one kernel that closes a half, if anything comes after its last product."""
    parts = [_norm(spec.post, spec.modulated)] if spec.post != "none" else []
    parts += [f"dropout {spec.p_res:g}"] if spec.p_res else []
    parts += [f"times {spec.m:g}"] if spec.m != 1.0 else []
    parts += ["sum"] * spec.residual + ([_norm(spec.out)] if spec.out != "none" else [])
    name = f"residual of {half}" if spec.residual else f"end of {half}"
    return [Step(name, s.rows, ", ".join(parts) + " in one pass", "its gradient")] if parts else []


def ffn_steps(s: Setting, f: FFNSpec, after: dict[str, str]) -> list[Step]:
    steps = []
    product, why = s.product()
    if f.pre != "none":
        kernel = "(residual of attention)" if _C.residual_makes_next_norm(s.text) else s.rows
        steps.append(Step("norm before FFN", kernel, _norm(f.pre, f.modulated), "made again"))
    first = "gate and up products" if f.gated else "up product"
    kernel, reason, activated = s.gate_up(f)
    steps.append(Step(first, kernel, reason, after["gu"]))
    steps += _adapters(s, f, ("gate", "up"), after["gu"])
    dropped = f" and dropout {f.p_hidden:g}" if f.p_hidden else ""
    kernel = f"({first})" if activated else s.rows
    steps.append(Step("activation", kernel, f"{f.act}{dropped} in one pass", "made again with its gradient"))
    steps.append(Step("down product", product, why, after["down"]))
    steps += _adapters(s, f, ("down",), after["down"])
    steps.append(Step("tiles of the FFN", "", s.tiles(f)[2], "the same"))
    return [*steps, *_residual(s, "FFN", f)]
