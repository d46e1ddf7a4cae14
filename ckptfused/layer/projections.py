"""What a projection, a norm or an activation of any library is in the block's terms, as it is at this call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import is_dtensor
from ckptfused.compat.torch_dispatch import is_traceable_wrapper_subclass
from ckptfused.compat.torch_modules import DEFAULT_EPS, is_packed
from ckptfused.compat.transformers import CONV1D
from ckptfused.layer.activations import activation_kind
from ckptfused.layer.hooks import watched
from ckptfused.layer.norms import own_kind
from ckptfused.layer.parts import Reason, weight
from ckptfused.layer.peft import LoRA, active_copy, adapters, is_lora
from ckptfused.layer.quantized import LINEARS, is_quantized, stored_weight
from ckptfused.layer.source import activation_of, as_read, class_name, norm_of
from ckptfused.layer.stored import Stored
from ckptfused.spec import BIASED_NORMS, GATED_ACTIVATIONS, GATED_BY


class Projection(NamedTuple):
    """A linear map: weight [out, in], or [in, out] where `transposed`, and the adapters beside it. `stored`: the weight
    is codes of few bits."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool = False
    adapters: tuple[LoRA, ...] = ()
    stored: Stored | None = None

    @property
    def in_features(self) -> int:
        return self.stored.shape[1] if self.stored is not None else self.weight.size(0 if self.transposed else 1)

    @property
    def out_features(self) -> int:
        return self.stored.shape[0] if self.stored is not None else self.weight.size(1 if self.transposed else 0)

    def rows(self, first: int, count: int) -> Projection | Reason:
        """The projection to `count` of its outputs. Its adapters have these rows of B."""
        if any(one.p for one in self.adapters):
            return Reason("an adapter with dropout beside a product whose parts go different ways")
        bias = lambda t: None if t is None else t.narrow(0, first, count)  # noqa: E731
        adapters = (one._replace(b=one.b.narrow(0, first, count), bias=bias(one.bias)) for one in self.adapters)
        weight = self.weight.narrow(1 if self.transposed else 0, first, count)
        return self._replace(weight=weight, bias=bias(self.bias), adapters=tuple(adapters))

    def columns(self, first: int, count: int) -> Projection:
        """The share of `count` of its inputs; the first one's has the biases. Its adapters have these columns of A."""
        bias = lambda t: t if first == 0 else None  # noqa: E731
        adapters = (one._replace(a=one.a.narrow(1, first, count), bias=bias(one.bias)) for one in self.adapters)
        weight = self.weight.narrow(0 if self.transposed else 1, first, count)
        return self._replace(weight=weight, bias=bias(self.bias), adapters=tuple(adapters))


def projection(module: Any, name: str = "", dtype: torch.dtype = torch.float32) -> Projection | Reason:
    """The tensors of a projection, or why it cannot be fused. A `Projection` stands for itself.

    name: by which the user knows it, here and below; "" for that of its class. dtype: of x, where the weight is stored
    in few bits.
    """
    if isinstance(module, Projection | Reason):
        return module
    kind, quantized = type(module), is_quantized(module)
    if kind in LINEARS and not quantized:
        return watched(module, name) or _plain(Projection(weight(module, "weight"), weight(module, "bias")), name)
    if (copy := active_copy(module)) is not module:
        return projection(copy, name, dtype)
    if (why := watched(module, name)) is not None:
        return why
    if class_name(kind) == CONV1D and as_read(module):
        return _plain(Projection(module.weight, module.bias, True), name)  # type: ignore[arg-type]
    if is_lora(module):
        base = projection(module.base_layer, name, dtype)
        if isinstance(base, Reason):
            return base
        found = adapters(module, base.weight.dtype if base.stored is None else dtype)
        return found if isinstance(found, Reason) else base._replace(adapters=found)
    if quantized:
        read = stored_weight(module, dtype, name)
        return read if isinstance(read, Reason) else Projection(read[0], _frozen_bias(module, dtype), stored=read[1])
    found_name = f"{kind.__module__}.{kind.__name__}"
    if _quantised(module):
        return Reason(f"{found_name} is quantised and runs a kernel of its own: the layer is checkpointed as it is")
    return Reason(f"{name} is a {found_name}, not PyTorch's Linear" if name else f"unknown projection {found_name}")


def _frozen_bias(module: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """The bias beside a weight in few bits, in the type of x: libraries cast it, too."""
    found: Tensor | None = weight(module, "bias")
    return found if found is None or found.requires_grad else found.to(dtype)


def _plain(found: Projection, name: str) -> Projection | Reason:
    """The projection, or why kernels cannot read its weight (a quantised one). FSDP may gather a distributed one."""
    kind = type(found.weight)
    if kind is nn.Parameter or not is_traceable_wrapper_subclass(found.weight) or is_dtensor(found.weight):
        return found
    return Reason(f"{name or 'a'} weight is a tensor of type {kind.__name__}")


def _quantised(module: nn.Module) -> bool:
    """Whether a projection holds its weight in integers, as bitsandbytes, GPTQ and AWQ do, or as PyTorch's own."""
    while "base_layer" in module._modules:  # PEFT's wrappers may hold integers of their own
        module = module.base_layer  # type: ignore[assignment]
    tensors = (*module.parameters(), *module.buffers())
    return any(not tensor.is_floating_point() for tensor in tensors) or is_packed(module)


def rate(dropout: Any) -> float:
    """The probability of a dropout module at this call; that it is one is for its half's `holders` to check."""
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


class Norm(NamedTuple):
    """A norm layer: its kind as `spec.NORMS`, eps and tensors."""

    kind: str = "none"
    eps: float = 1e-5
    weight: Tensor | None = None
    bias: Tensor | None = None


NO_NORM = Norm()


def norm(module: nn.Module | Norm, width: int, dtype: torch.dtype, name: str = "") -> Norm | Reason:
    """The norm that a module computes over its last dimension, `width` wide, or why it cannot be fused. A `Norm` stands
    for itself; its eps may be None, as PyTorch's.
    """
    if isinstance(module, Norm):
        return module._replace(eps=_eps(module.eps, dtype))
    found = module if own_kind(type(module).forward) else active_copy(module)
    if (why := watched(found, name)) is not None:
        return why
    return norm_of_class(found, width, dtype, name)


def norm_of_class(module: nn.Module, width: int, dtype: torch.dtype, name: str = "") -> Norm | Reason:
    """The norm that the forward of a module's class computes, whoever watches the module."""
    cls, found = type(module), vars(module)
    kind = own_kind(cls.forward) or norm_of(cls, cls.forward)
    if kind is None:
        return Reason(f"{f'{name}: ' if name else ''}unknown norm {cls.__module__}.{cls.__name__}")
    if found.get("normalized_shape", (width,)) != (width,):
        return Reason(f"{name or 'a norm'} is a {cls.__name__} that the kernels do not compute over {width} values")
    eps = _eps(getattr(module, "variance_epsilon" if "variance_epsilon" in found else "eps"), dtype)
    bias = weight(module, "bias") if kind in BIASED_NORMS else None
    return Norm(kind, eps, weight(module, "weight"), bias)


def _eps(eps: float | None, dtype: torch.dtype) -> float:
    if eps is not None:
        return eps
    if dtype in DEFAULT_EPS:
        return DEFAULT_EPS[dtype]
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0  # of another type is no x that a block takes


def activation(act: Any, gated: bool, name: str = "") -> str | Reason:
    """The fused kind of an activation, or why it cannot be fused. gated: it is applied to the gate, or made for both
    halves of a joint product.
    """
    if isinstance(act, nn.Module) and (why := watched(act, name)) is not None:
        return why
    kind = activation_kind(act)
    if kind is None and isinstance(act, nn.Module) and as_read(act):
        kind = activation_of(type(act))
    if gated and kind not in GATED_ACTIVATIONS:
        kind = GATED_BY.get(kind or "")
    return Reason(f"activation {getattr(act, '__name__', type(act).__name__)} has no kernel") if kind is None else kind
