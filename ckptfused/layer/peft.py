"""PEFT's wrappers: LoRA on a projection, and `modules_to_save` around anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Dropout, Identity, Linear

from ckptfused.checks import autocast_enabled
from ckptfused.compat.peft import LORA_LINEARS, MODULES_TO_SAVE, adapter_names
from ckptfused.layer.hooks import hooked
from ckptfused.layer.parts import Reason
from ckptfused.layer.source import as_read, class_name


class LoRA(NamedTuple):
    """One active adapter. **Shapes** a [rank, in], b [out, rank], bias [out] or None."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    scale: float
    p: float


def is_lora(module: nn.Module) -> bool:
    """Whether a projection is wrapped by PEFT's LoRA, and runs the code that was read."""
    return class_name(type(module)) in LORA_LINEARS and as_read(module)


def adapted(module: nn.Module) -> bool:
    """Whether a wrapper of PEFT's around a layer adds, at this call, to what the layer's own weight gives."""
    found: Any = module
    if "base_layer" not in module._modules:
        return False
    held = [getattr(found, name, ()) for name in found.adapter_layer_names]
    adds = any(name in adapters for adapters in held for name in found.active_adapters)
    return (adds and not (found.merged or found.disable_adapters)) or adapted(found.base_layer)


def active_copy(module: nn.Module) -> nn.Module:
    """The module that a `ModulesToSaveWrapper` runs now; any other module itself."""
    found: Any = module
    if class_name(type(module)) != MODULES_TO_SAVE or hooked(module) or not as_read(module):
        return module
    active = found.active_adapters
    if found.disable_adapters or not active or any(name not in adapter_names(found) for name in active):
        return found.original_module
    return found.modules_to_save[active[0]]


def adapters(module: Any, base: torch.dtype) -> tuple[LoRA, ...] | Reason:
    """The adapters that a LoRA projection adds at this call, in PEFT's order. base: the type of the weight beside."""
    if module.disable_adapters:
        # PEFT takes merged adapters out of the weight at this moment.
        return Reason("merged adapters are about to be unmerged", original=True) if module.merged else ()
    if module.merged:
        return ()
    found: list[LoRA] = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if name in module.lora_variant:
            return Reason(f"LoRA variant {type(module.lora_variant[name]).__name__} (DoRA or another)")
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        if not (type(a) is type(b) is Linear) or a.bias is not None or any(map(hooked, (a, b, dropout))):
            return Reason("an adapter whose A or B is no plain Linear")
        if isinstance(p := dropout_rate(dropout), Reason):
            return p
        own = a.weight.dtype
        if not module.cast_input_dtype_enabled and own != base:
            return Reason("an adapter of another dtype than its input, with casting switched off")
        if own not in (base, torch.float32) and not autocast_enabled(a.weight):
            return Reason(f"an adapter of {own} beside a weight of {base}: PEFT casts its input, the kernels do not")
        scale = module.scaling[name]
        if isinstance(scale, Tensor) and torch.compiler.is_compiling():
            return Reason("an adapter's scale is a tensor (PEFT's hotswap), which torch.compile cannot read")
        found.append(LoRA(a.weight, b.weight, b.bias, float(scale), p))
    return tuple(found)


def dropout_rate(module: nn.Module) -> float | Reason:
    """The probability with which one of PEFT's `lora_dropout` drops at this call."""
    if type(module) not in (Dropout, Identity):
        return Reason(f"adapter dropout of type {type(module).__name__}")
    return module.p if type(module) is Dropout and module.training else 0.0


def given_caches(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that run with a filled key/value cache at each call, since PEFT's active adapter is a prefix."""
    peft: Any = sys.modules.get("peft")
    adapted = [] if peft is None else [m for m in model.modules() if isinstance(m, peft.PeftModel)]
    for module in adapted:
        if module.active_peft_config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE"):
            continue
        base: Any = module.get_base_model()
        divided = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
        without = set(base.get_encoder().modules()) if divided else set()
        yield from (inner for inner in base.modules() if inner not in without)
