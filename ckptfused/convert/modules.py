"""What a projection, a norm or an activation of another library is in the block's terms, as it is at this call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ckptfused.convert.parts import Reason
from ckptfused.convert.peft import LoRA, active_copy, adapters, is_lora
from ckptfused.convert.source import activation_of, as_read, class_name, norm_of, patched
from ckptfused.modules.activations import activation_kind
from ckptfused.modules.assemble import hooked as any_hook
from ckptfused.modules.shards import is_fully_sharded
from ckptfused.spec import GATED_BY

_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
_CONV1D = "transformers.pytorch_utils.Conv1D"
_EVERYWHERE: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
# The hook by which Hugging Face collects outputs.
_COLLECTS = ("transformers.utils.output_capturing", "output_capturing_hook")


def collects(hook: Any) -> bool:
    """Whether a hook is one of those by which Hugging Face collects outputs."""
    return (getattr(hook, "__module__", ""), getattr(hook, "__name__", "")) == _COLLECTS


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches or patches a module that a fused layer does not call.

    Hugging Face's own hooks, which stay once outputs were collected, count only while it collects: there the
    original forward runs (`hugging_face.collecting`).
    """
    if not any_hook(module):
        return False
    others = not all(map(collects, module._forward_hooks.values()))
    return bool(
        others or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks or patched(module)
    )


def watched(module: nn.Module) -> Reason | None:
    """Why a module that a fused layer does not call has to be called; None where it need not."""
    if not hooked(module):
        return None
    name = type(module).__name__
    if is_fully_sharded(module):
        name = name.removeprefix("FSDP")
        return Reason(f"{name} is sharded by itself (fully_shard inside the layer), so FSDP's hooks on it have to run")
    return Reason(f"{name} has a hook or a forward of its own")


def hooked_everywhere() -> bool:
    """Whether somebody registered hooks for all modules. PyTorch's own tracker only watches which module runs."""
    return any(hook.__module__ != "torch.utils.module_tracker" for hooks in _EVERYWHERE for hook in hooks.values())


LENT = Reason("tensors stand in for its weights (functional_call)", original=True)


def lent_weights(layer: nn.Module) -> bool:
    """Whether tensors stand in for parameters during this call, as `functional_call` does: a replay in backward would
    find the parameters again. FSDP1's views of its flat parameter are there then.
    """
    return any(
        weight is not None and not isinstance(weight, nn.Parameter)
        for module in layer.modules()
        if not getattr(module, "_is_fsdp_managed_module", False)
        for weight in module._parameters.values()
    )


class Projection(NamedTuple):
    """A linear map: weight [out, in], or [in, out] where `transposed`, and the adapters beside it."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    adapters: tuple[LoRA, ...] = ()

    @property
    def out_features(self) -> int:
        return self.weight.size(1 if self.transposed else 0)


def projection(module: Any) -> Projection | Reason:
    """The tensors of a projection, or why it cannot be fused. A `Projection` stands for itself."""
    if isinstance(module, Projection):
        return module
    module = active_copy(module)
    kind = type(module)
    if (why := watched(module)) is not None:
        return why
    if kind in _LINEAR:
        return Projection(module.weight, module.bias, False)  # type: ignore[arg-type]
    if class_name(kind) == _CONV1D and as_read(module):
        return Projection(module.weight, module.bias, True)  # type: ignore[arg-type]
    if is_lora(module):
        base, found = projection(module.base_layer), adapters(module)  # type: ignore[arg-type]
        if isinstance(base, Reason) or isinstance(found, Reason):
            return base if isinstance(base, Reason) else found  # type: ignore[return-value]
        return base._replace(adapters=found)
    name = f"{kind.__module__}.{kind.__name__}"
    if _quantised(module):
        return Reason(f"{name} is quantised and runs a kernel of its own: the layer is checkpointed as it is")
    return Reason(f"unknown projection {name}")


def _quantised(module: nn.Module) -> bool:
    """Whether a projection holds its weight in integers, as bitsandbytes, GPTQ and AWQ do, or as PyTorch's own."""
    tensors = (*module.parameters(), *module.buffers())
    return any(not tensor.is_floating_point() for tensor in tensors) or hasattr(module, "_packed_params")


def rate(dropout: Any) -> float:
    """The probability of a dropout module at this call; that it is one is for `Attention.holders` to check."""
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


class Norm(NamedTuple):
    """A norm layer: its kind as `spec.NORMS`, eps and tensors."""

    kind: str
    eps: float
    weight: Tensor | None
    bias: Tensor | None


def norm(module: nn.Module, x: Tensor) -> Norm | Reason:
    """The norm that a module computes over its last dimension, or why it cannot be fused."""
    module = active_copy(module)
    kind = norm_of(type(module), type(module).forward)
    if (why := watched(module)) is not None:
        return why
    if kind is None:
        return Reason(f"unknown norm {type(module).__module__}.{type(module).__name__}")
    found: Any = module
    if len(getattr(found, "normalized_shape", (0,))) != 1:
        return Reason(f"norm over {len(found.normalized_shape)} dimensions")
    eps = found.variance_epsilon if hasattr(found, "variance_epsilon") else found.eps
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    return Norm(kind, eps, found.weight, getattr(found, "bias", None))


def activation(act: Any, gated: bool) -> str | Reason:
    """The fused kind of an activation, or why it cannot be fused."""
    if isinstance(act, nn.Module) and (why := watched(act)) is not None:
        return why
    kind = activation_kind(act)
    if kind is None and isinstance(act, nn.Module) and as_read(act):
        kind = activation_of(type(act))
    kind = GATED_BY.get(kind or "") if gated else kind
    return Reason(f"activation {act!r} has no kernel") if kind is None else kind
