"""Weights that a library stores in few bits, in the block's terms, as they are at this call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import type_before_parametrizations

from ckptfused.checks import has_values
from ckptfused.compat.quantizers import (
    AWQ_LINEAR,
    AWQ_METHODS,
    FOUR_BIT_STACK,
    GPTQ_LINEARS,
    GPTQ_METHODS,
    HQQ_LINEAR,
    HQQ_METHODS,
    INT8_TENSOR,
    LINEAR_4BIT,
    LINEAR_8BIT,
    NF4_TENSOR,
    PACKED,
    four_bit_compute_type,
    four_bit_state,
    gptq_parts,
    hqq_parts,
    int8_parts,
    nf4_parts,
    repacked,
    row_scales,
    runs_own_dequantize,
)
from ckptfused.compat.torch_autograd import saved_tensor_hooks
from ckptfused.compat.torch_distributed import is_partitioned
from ckptfused.cost.open_ledger import device_counted
from ckptfused.layer.hooks import hooked
from ckptfused.layer.parts import Reason, weight
from ckptfused.layer.source import as_read, class_as_read, class_name
from ckptfused.layer.stored import Stored, Weight, wanted_type, with_check

# As they are now: a subclass that somebody puts in their place in torch.nn may compute something else.
LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is stored in few bits, and runs the code that was read."""
    return _reader(module) is not None


def stored_weight(module: nn.Module, dtype: torch.dtype, name: str) -> Weight:
    """The codes of such a layer's weight and how they are stored, or why it is not fused. dtype: of x.

    **Raises** `RuntimeError` where the layer would silently train without gradients.
    """
    name, reader = name or type(module).__name__, _reader(module)
    assert reader is not None
    found = reader(module, dtype, name)
    if isinstance(found, Reason):
        return found
    owner = module._parameters.get("weight")
    if found[0].requires_grad or (owner is not None and owner.requires_grad):
        return Reason(f"{name}: its quantized weight asks for a gradient")
    wanted = wanted_type(found[0], dtype)  # what autocast makes of it now: a backward may run without

    def read(owner: nn.Module) -> Weight | None:
        return reader(owner, wanted, name) if _reader_by_kind(owner)[0] is reader else None

    return found[0], with_check(found, module, read, name)


def _reader(module: nn.Module) -> Callable[[Any, torch.dtype, str], Weight] | None:
    reader, methods = _reader_by_kind(module)
    if reader is None:
        return None
    kind: Any = type(module)
    if kind in LINEARS:
        of = type(module._parameters["weight"])
        return reader if all(class_as_read(of, getattr(of, method)) for method in methods) else None
    as_they_were = as_read(module) and all(_runs_own(module, kind, name) for name in methods)
    return reader if as_they_were else None


def _reader_by_kind(module: nn.Module) -> tuple[Callable[[Any, torch.dtype, str], Weight] | None, tuple[str, ...]]:
    """Who reads modules of this class, or with a weight of this class, and the methods of it that were read."""
    kind: Any = type(module)
    if kind not in LINEARS:
        return _OF_LAYERS.get(class_name(kind), (None, ()))
    of = type(module._parameters.get("weight"))
    return (None, ()) if of is nn.Parameter else _OF_TENSORS.get(f"{of.__module__}.{of.__qualname__}", (None, ()))


def _runs_own(module: nn.Module, kind: Any, name: str) -> bool:
    """Whether a module's method, and each that it overrides, is one that was read."""
    return (name not in vars(module) or (name == "dequantize_weight" and runs_own_dequantize(module))) and all(
        class_as_read(base, vars(base)[name]) for base in kind.__mro__ if name in vars(base)
    )


def _four_bits(module: Any, dtype: torch.dtype, name: str) -> Weight:
    codes, state = weight(module, "weight"), four_bit_state(module)
    if state is None:
        if has_values(codes) and codes.shape[-1] == 1 != module.in_features:  # as bitsandbytes packs them
            raise RuntimeError(
                f"{name}: its weight is in 4 bits without the state that belongs to it: load the model again"
            )
        return Reason(f"{name}: its weight is not quantized yet (move the model to its device)")
    if repacked(state):
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(f"{name}: {PACKED}")
        return Reason(f"{name}: bitsandbytes packed its weight for inference", original=True)
    own, wanted = four_bit_compute_type(module, dtype, (torch.float32, torch.bfloat16)), wanted_type(codes, dtype)
    if own != wanted:
        return _another_type(name, own, wanted, "load the model with bnb_4bit_compute_dtype")
    if tuple(state.shape) != (module.out_features, module.in_features):
        return Reason(f"{name}: its weight was quantized as {list(state.shape)}, expected [out, in]")
    return _four_bits_of(codes, state, name)


def _four_bits_of(codes: Tensor, state: Any, name: str) -> Weight:
    shape = tuple(state.shape)
    if not state.nested:
        if state.absmax.dtype != torch.float32:
            return Reason(f"{name}: its scales are {state.absmax.dtype}, expected float32")
        absmax = _to_be_saved(state.absmax)
        return _to_be_saved(codes), Stored((state.quant_type, state.blocksize), (absmax, None, None, None), shape)
    inner = state.state2
    offset = state.offset.to(codes.device)  # a number, which in a model without data may have stayed one
    beside = tuple(map(_to_be_saved, (state.absmax, offset, inner.absmax, inner.code)))
    return _to_be_saved(codes), Stored((state.quant_type, state.blocksize, inner.blocksize), beside, shape)


class Stack(NamedTuple):
    """A parameter [E, rows, columns] that bitsandbytes has stored in 4 bits."""

    codes: Tensor
    """uint8 [E, bytes]."""
    stored: Stored
    dtype: torch.dtype
    """The type of the numbers that its module would find."""


def stored_stack(module: nn.Module, name: str) -> Stack | Reason | None:
    """How such a parameter is stored, or why it cannot be read; None of any other."""
    read = _stack_parts(module, name)
    if read is None or isinstance(read, Reason):
        return read
    held: Any = module._modules["parametrizations"]
    made_by, *others = held[name]
    if others or not as_read(made_by) or hooked(made_by) or hooked(held[name]):
        return None
    codes, state = read[0].reshape(-1).view(torch.uint8), made_by.quant_state
    count = state.shape[0]
    if len(state.shape) != 3 or 2 * codes.numel() != math.prod(state.shape) or codes.numel() % count:
        return Reason(f"{name}: its weights were quantized as {list(state.shape)}, expected [E, out, in]")
    stored = with_check(read, module, lambda owner: _stack_parts(owner, name), name)
    return Stack(codes.view(count, -1), stored, state.dtype)


def _stack_parts(module: Any, name: str) -> Weight | None:
    held = module._modules.get("parametrizations")
    if held is None or name not in held or class_name(type(held[name][0])) != FOUR_BIT_STACK:
        return None
    return _four_bits_of(held[name].original, held[name][0].quant_state, name)


def stack_numbers(module: nn.Module) -> dict[str, Tensor]:
    """What such parameters of a module are as numbers, without data, by name."""
    held: Any = module._modules.get("parametrizations") or {}
    of = {
        name: made_by[0].quant_state for name, made_by in held.items() if class_name(type(made_by[0])) == FOUR_BIT_STACK
    }
    return {name: torch.empty(state.shape, dtype=state.dtype, device="meta") for name, state in of.items()}


def unparametrized(module: nn.Module) -> Any:
    """A shallow copy of a module, of the class that it had before anybody parametrized it, without its parametrized
    parameters."""
    kind: Any = type_before_parametrizations(module)
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    made._modules = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    made._parameters = dict(module._parameters)
    return made


def _eight_bits(module: Any, dtype: torch.dtype, name: str) -> Weight:
    codes, scales = row_scales(module)
    held = weight(module, "weight")
    if scales is None and held.dtype == torch.int8 and has_values(held):
        raise RuntimeError(f"{name}: its weight is int8 without the scales that belong to it: load the model again")
    if codes is None or scales is None or module.state.has_fp16_weights:
        return Reason(f"{name}: its weight is not quantized yet (move the model to its device)")
    if device_counted(codes) not in ("cpu", "meta"):  # the latter where a plan is made, of which nothing runs yet
        return Reason(f"{name} computes in int8 there, outliers apart: the layer is checkpointed as it is")
    if not module.training:
        return Reason(f"{name} computes in int8 in evaluation", original=True)
    return codes, Stored(("absmax8",), (scales, None, None, None), (module.out_features, module.in_features))


def _hqq(module: Any, dtype: torch.dtype, name: str) -> Weight:
    found = hqq_parts(module)
    if found is None or not (isinstance(found.scale, Tensor) and isinstance(found.offset, Tensor)):
        return Reason(f"{name}: its scales are quantized, on the host or numbers, or its codes are not packed")
    if torch.compiler.is_compiling():
        return Reason(f"{name} is HQQ's, whose tensors torch.compile cannot read")
    if (own := found.scale.dtype) != (wanted := wanted_type(found.codes, dtype)):
        return _another_type(name, own, wanted, "quantize the model with compute_dtype")
    shape = (module.out_features, module.in_features)
    if found.block is None or found.scale.numel() * found.block != math.prod(shape):
        return Reason(f"{name}: its {found.scale.numel()} scales are not one for each {found.block} entries")
    form = (found.kind, found.block, 0, _type_name(own), found.strided)
    state = (_to_be_saved(found.scale), _to_be_saved(found.offset), None, None)
    return _to_be_saved(found.codes), Stored(form, state, shape)


def _int8_tensor(module: Any, dtype: torch.dtype, name: str) -> Weight:
    found, shape = int8_parts(module.weight), tuple(module.weight.shape)
    if found.quantizes_input:
        return Reason(f"{name} quantizes its input, too, in a kernel of its own: the layer is checkpointed as it is")
    if found.scale.dtype != torch.float32 or (found.block[0] != 1 and found.block != shape):
        which = f"{found.scale.dtype} for blocks {list(found.block)}"
        return Reason(f"{name}: its scales are {which}, expected float32 for rows, parts of these, or all")
    offset = found.offset if found.block[1] < shape[1] else None
    return found.codes, Stored(("int8", math.prod(found.block)), (found.scale, offset, None, None), shape)


def _nf4_tensor(module: Any, dtype: torch.dtype, name: str) -> Weight:
    found = nf4_parts(module.weight)
    state = (found.scale, found.mean, found.nested_scale, found.table)
    form = ("table", found.block, found.nested, _type_name(found.table.dtype))
    return found.codes, Stored(form, state, tuple(module.weight.shape))


def _gptq(module: Any, dtype: torch.dtype, name: str) -> Weight:
    found, shape = gptq_parts(module), (module.out_features, module.in_features)
    if found.why:
        return Reason(f"{name} {found.why}")
    blocks = -(-shape[1] // found.block)
    if found.scale.shape != (blocks, shape[0]) or (found.blocks is not None and found.blocks.numel() != shape[1]):
        return Reason(f"{name}: its {list(found.scale.shape)} scales are not one for each {found.block} inputs")
    scales = _type_name(found.scale.dtype)
    if found.blocks is None and (found.scale.dtype != dtype or dtype not in (torch.float16, torch.bfloat16)):
        types = "torch.float16 or torch.bfloat16"
        return Reason(f"{name} computes in {types}, and has scales of {scales} beside {dtype}: move the model to one")
    form = (f"{'awq' if found.blocks is None else 'gptq'}{found.bits}", found.block, 0, scales)
    return found.codes, Stored(form, (found.scale, found.offset, None, found.blocks), shape)


_OF_LAYERS: dict[str, tuple[Callable[..., Weight], tuple[str, ...]]] = {
    LINEAR_4BIT: (_four_bits, ()),
    LINEAR_8BIT: (_eight_bits, ()),
    HQQ_LINEAR: (_hqq, HQQ_METHODS),
    **dict.fromkeys(GPTQ_LINEARS, (_gptq, GPTQ_METHODS)),
    AWQ_LINEAR: (_gptq, AWQ_METHODS),
}
"""How each layer is read, and the methods of its class that were, beside its forward."""
_OF_TENSORS: dict[str, tuple[Callable[..., Weight], tuple[str, ...]]] = {
    INT8_TENSOR: (_int8_tensor, ("dequantize",)),
    NF4_TENSOR: (_nf4_tensor, ("get_original_weight",)),
}
"""How each tensor is read, and the method of its class that was."""


def _to_be_saved(t: Tensor) -> Tensor:
    """The tensor, or a second one over its memory where it was made in inference mode: autograd saves none of those;
    and where hooks take what is saved: bitsandbytes' codes move their state along when they are moved."""
    if torch.compiler.is_compiling():
        return t
    if t.is_inference():
        made = torch.empty(0, dtype=t.dtype, device=t.device)
        return made.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())  # type: ignore[call-overload, no-any-return]
    as_it_is = type(t) in (Tensor, nn.Parameter) or saved_tensor_hooks() is None or is_partitioned(t)
    return t if as_it_is else t.detach()


def _another_type(name: str, own: torch.dtype, wanted: torch.dtype, how: str) -> Reason:
    return Reason(f"{name} computes in {own} beside {wanted}: {how}={wanted}")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
