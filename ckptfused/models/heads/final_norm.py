"""The forward of the norm before a chunked loss: it saves its input alone, where the model's own saves that in float32,
what it divides it by and the result of each step."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checks import is_dtensor, transformed
from ckptfused.compat.accelerate import BELOW_HOOKS
from ckptfused.layer.parts import Reason
from ckptfused.layer.peft import active_copy
from ckptfused.layer.projections import Norm, norm_of_class
from ckptfused.layer.source import is_patched, is_replaced
from ckptfused.ops.norm import norm


class NormForward:
    """The `forward` of a norm in training. Any other call runs the module's own.

    An attribute of the instance, so that its hooks run as before.
    """

    __name__ = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __wrapped__(self) -> Any:
        """What others read the names of the arguments from."""
        return MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._norm(*args) if len(args) == 1 and not kwargs else None
        if found is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return norm(args[0], found.weight, found.bias, found.kind, found.eps)

    def _norm(self, x: Any) -> Norm | None:
        """The norm that this call computes, or None: its own forward does."""
        module = self.module
        trains = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not trains or transformed() or is_replaced(type(module)) or not _is_plain(x):
            return None
        found = norm_of_class(module, x.size(-1), x.dtype)
        if isinstance(found, Reason):
            return None
        tensors = [t for t in (found.weight, found.bias) if t is not None]
        # Of mixed types, and under autocast, a norm's result has a type of its own.
        alike = all(t.dtype == x.dtype and not is_dtensor(t) for t in tensors)
        cast = x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)
        return found if alike and not cast and x.is_floating_point() else None


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested and not is_dtensor(x) and x.dim() > 0


def put_in(module: nn.Module | None) -> None:
    """Gives a norm this forward, in PEFT's wrapper the copy that runs now, unless somebody gave it another; what is
    none keeps running its own."""
    if module is not None and not is_patched(module := active_copy(module)):
        module.forward = NormForward(module)  # type: ignore[assignment]


def take_out(module: nn.Module) -> None:
    """Gives it its own back, below accelerate's hooks too."""
    if isinstance(vars(module).get("forward"), NormForward):
        del module.forward
    if isinstance(vars(module).get(BELOW_HOOKS), NormForward):
        setattr(module, BELOW_HOOKS, MethodType(type(module).forward, module))
