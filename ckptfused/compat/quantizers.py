"""What of libraries that store weights in few bits is not documented: bitsandbytes 0.49 and 0.50, HQQ 0.2.8,
torchao 0.18, GPTQModel 7.7."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptfused.compat.torch_modules import call_always, forward_hooks, forward_pre_hooks

LINEAR_4BIT = "bitsandbytes.nn.modules.Linear4bit"
LINEAR_8BIT = "bitsandbytes.nn.modules.Linear8bitLt"
FOUR_BIT_STACK = "bitsandbytes.nn.parametrize.Bnb4bitParametrization"
"""What makes numbers of a parameter that its `replace_parameter_4bit` has stored, as of a stack of experts."""
HQQ_LINEAR = "hqq.core.quantize.HQQLinear"
HQQ_METHODS = ("matmul", "dequantize")
"""What its forward calls of itself."""
GPTQ_LINEARS = (
    "gptqmodel.nn_modules.qlinear.torch.TorchLinear",
    "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2Linear",
    "gptqmodel.nn_modules.qlinear.torch_aten_kernel.TorchAtenLinear",
)
"""GPTQModel's layers that train on numbers of their weights."""
AWQ_LINEAR = "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear"
GPTQ_METHODS = ("_forward", "_forward_eager", "dequantize_weight", "_dequantize_from_codes", "_apply_rotation_to_input")
AWQ_METHODS = ("_dequantize_weight_for_inference", "_ensure_runtime_dtype")
"""What their forwards call of themselves."""
INT8_TENSOR = "torchao.quantization.Int8Tensor"
NF4_TENSOR = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor"
PACKED = (
    "bitsandbytes packed its 4-bit weight anew in an evaluation on this processor (AVX512-BF16), and now trains "
    "without gradients: load the model again, and convert it before it is evaluated"
)
_HQQ_KINDS = {"8bit_u8": "uint8", "4bit_u8": "uint4", "3bit_32": "uint3", "2bit_u8": "uint2", "1bit_u8": "uint1"}


def four_bit_state(module: Any) -> Any:
    """The scales of a 4-bit layer; None before its weight is quantized. A move or FSDP leaves them with the module."""
    state = getattr(module._parameters["weight"], "quant_state", None)
    return getattr(module, "quant_state", None) if state is None else state


def changes_nothing(hook: Any) -> bool:
    """Whether a hook is what bitsandbytes puts on a module with such a parameter, which has PyTorch keep the numbers
    for the time of a forward and does nothing else; or that of `refuse_gradients_of_packed`."""
    return hook is _without_gradients or getattr(hook, "__module__", None) == FOUR_BIT_STACK.rpartition(".")[0]


def repacked(state: Any) -> bool:
    """Whether an evaluation on a processor with AVX512-BF16 has packed a weight anew, for good; then its layer
    gives no gradients. `packing_format_for_cpu`."""
    return getattr(state, "packing_format_for_cpu", False)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_SUPPORT = "support_avx512bf16_for_cpu"


class _Processor(enum.IntEnum):
    """What `support_avx512bf16_for_cpu` of a 4-bit layer says that could pack its weight, and is to leave it."""

    LEFT_OUT = 0


def four_bit_layers(model: nn.Module) -> list[Any]:
    """The modules of a model that are bitsandbytes' in 4 bits, or of a class of theirs."""
    kinds = {kind for kind in map(type, model.modules()) if LINEAR_4BIT in map(_name_of, kind.__mro__)}
    return [module for module in model.modules() if type(module) in kinds]


def never_pack(model: nn.Module) -> None:
    """Has no evaluation pack the 4-bit layers of a model anew from now on."""
    for layer in four_bit_layers(model):
        if vars(layer).get(_SUPPORT):  # older versions have none
            layer.support_avx512bf16_for_cpu = _Processor.LEFT_OUT


def end_caches(model: nn.Module) -> None:
    """Has PyTorch keep the numbers of parameters in 4 bits no longer than a forward lasts. After one that a replay ends
    early bitsandbytes 0.49 leaves them there, for this module and for another at its place in memory."""
    for module in model.modules():
        for key in [key for key, hook in forward_hooks(module).items() if changes_nothing(hook)]:
            call_always(module, key)


def refuse_gradients_of_packed(model: nn.Module) -> None:
    """Has the layers of a model that are packed raise where they would give no gradient."""
    for layer in four_bit_layers(model):
        if repacked(four_bit_state(layer)) and _without_gradients not in forward_pre_hooks(layer).values():
            layer.register_forward_pre_hook(_without_gradients)


def as_bitsandbytes_does(model: nn.Module) -> None:
    """Undoes `never_pack` and `refuse_gradients_of_packed`."""
    for layer in four_bit_layers(model):
        if vars(layer).get(_SUPPORT) is _Processor.LEFT_OUT:
            layer.support_avx512bf16_for_cpu = True
        for key in [key for key, hook in forward_pre_hooks(layer).items() if hook is _without_gradients]:
            del forward_pre_hooks(layer)[key]


def _without_gradients(module: nn.Module, args: tuple[Any, ...]) -> None:
    asked = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    if asked and repacked(four_bit_state(module)):  # to save a model unpacks it
        raise RuntimeError(PACKED)


def four_bit_compute_type(module: Any, dtype: Any, safe: tuple[Any, ...]) -> Any:
    """The type in which a 4-bit layer will compute with an x of this type: its own once that is settled, at the first
    call. safe: types that then settle it."""
    if not module.compute_type_is_set and dtype in safe:
        return dtype
    return dtype if module.compute_dtype is None else module.compute_dtype


def row_scales(module: Any) -> tuple[Any, Any]:
    """The int8 weight of an 8-bit layer and its rows' scales, which its first call takes over; None without."""
    weight, state = module._parameters["weight"], module.state
    own = getattr(weight, "CB", None), getattr(weight, "SCB", None)
    return own if own[0] is not None else (state.CB, state.SCB)


def load_in_4bit(model: Any, dtype: torch.dtype) -> None:
    """Gives a language model on the meta device the layers that `BitsAndBytesConfig(load_in_4bit=True)` gives one that
    is loaded, as NF4 with a scale for 64 weights, without data.

    transformers 5: `integrations.replace_with_bnb_linear`, `quantizers.base.get_keys_to_not_convert`. **Raises**
    `ModuleNotFoundError` without bitsandbytes.
    """
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    block = 64
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    replace_with_bnb_linear(model, kept, config)
    for layer in model.modules():
        if not isinstance(layer, bnb.nn.Linear4bit):
            continue
        count = layer.weight.numel()
        with torch.device("meta"):
            scales, code = torch.empty(-(-count // block)), torch.empty(16)
            state = bnb.functional.QuantState(scales, layer.weight.shape, code, block, "nf4", dtype)
            codes = torch.empty(-(-count // 2), 1, dtype=torch.uint8)
            layer.weight = bnb.nn.Params4bit(
                codes, False, state, block, False, "nf4", module=layer, bnb_quantized=True
            )  # fmt: skip


class HQQParts(NamedTuple):
    """The weight of an `HQQLinear`: its kind as `spec.QUANTIZATIONS` has it, codes, and what stands beside them."""

    kind: str
    codes: Any
    scale: Any
    offset: Any
    block: int | None
    strided: bool


def hqq_parts(module: Any) -> HQQParts | None:
    """Reads a layer; None where scales or offsets are quantized themselves or on the host, or codes are not packed."""
    meta = module.meta
    if not module.ready or meta["quant_scale"] or meta["quant_zero"] or "zero_scale" in meta or not meta["packing"]:
        return None
    kind = _HQQ_KINDS[meta["packing"]]
    return HQQParts(kind, module.W_q, meta["scale"], meta["zero"], meta["group_size"], meta["axis"] == 0)


class Int8Parts(NamedTuple):
    """An `Int8Tensor`: codes [out, in], scales and offsets of blocks, and whether inputs are quantized, too."""

    codes: Any
    scale: Any
    offset: Any
    block: tuple[int, ...]
    quantizes_input: bool


def int8_parts(weight: Any) -> Int8Parts:
    """Reads a weight. Its products leave the offsets out where a row shares a scale."""
    inputs = weight.act_quant_kwargs is not None or weight.act_pre_scale is not None
    return Int8Parts(weight.qdata, weight.scale, weight.zero_point, tuple(weight.block_size), inputs)


class NF4Parts(NamedTuple):
    """An `NF4Tensor`: two codes a byte, and its scales, which are integers around a mean."""

    codes: Any
    scale: Any
    mean: Any
    nested_scale: Any
    table: Any
    block: int
    nested: int


def nf4_parts(weight: Any) -> NF4Parts:
    """Reads a weight."""
    beside = weight.quantized_scalers, weight.scaler_mean, weight.quantization_factor, weight.nf4
    return NF4Parts(weight.quantized_data, *beside, weight.block_size, weight.scaler_block_size)


class GPTQParts(NamedTuple):
    """A layer of GPTQModel's: bits, and buffers; `blocks` of its inputs. `why` it is not fused, if it is not."""

    bits: int
    codes: Any
    scale: Any
    offset: Any
    blocks: Any
    block: int
    why: str


def gptq_parts(module: Any) -> GPTQParts:
    """Reads a layer. `TorchAtenLinear` settles at its first call whether it trains or was evaluated first, and then
    has packed its weights anew, for good: **raises** `RuntimeError` where it trains then, without gradients."""
    mode = vars(module).get("linear_mode")
    if mode is None and "linear_mode" in vars(module) and module.training:
        module.linear_mode = "train"
    why = ""
    if mode == "inference":
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "GPTQModel packed its weight anew in an evaluation, and now trains without gradients: load the model "
                "again, and train it before it is evaluated"
            )
        why = "was packed for inference"
    elif module.adapter is not None:
        why = "has an adapter of GPTQModel's"
    elif getattr(module, "online_full_had", False) or getattr(module, "online_partial_had", False):
        why = "rotates its input"
    elif getattr(module, "planar", False) or module.bits not in (2, 4, 8) or module.qweight.dtype != torch.int32:
        why = f"stores {module.bits} bits in {module.qweight.dtype} of another layout"
    blocks = getattr(module, "g_idx", None)
    return GPTQParts(module.bits, module.qweight, module.scales, module.qzeros, blocks, module.group_size, why)


def runs_own_dequantize(module: Any) -> bool:
    """Whether a layer of GPTQModel's makes numbers of its weight by its class's method; once it is ready it has
    compiled that. `torch.compile` 2.8 to 2.13: `_torchdynamo_orig_callable`."""
    own = vars(module).get("dequantize_weight")
    own = getattr(own, "_torchdynamo_orig_callable", own)
    return own is None or getattr(own, "__func__", own) is getattr(type(module), "dequantize_weight", None)
