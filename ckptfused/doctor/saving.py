"""A model without any checkpointing: the step that all others are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ckptfused.convert.forward import ConvertedForward
from ckptfused.doctor.recorder import replaced_checkpoints
from ckptfused.modules import FusedCheckpointSequential
from ckptfused.modules.fused import FusedModule


@contextlib.contextmanager
def everything_saved(model: nn.Module) -> Iterator[None]:
    """Within, checkpoints of PyTorch's only call their function, and with them those of Hugging Face, of FSDP's wrapper
    and ckptfused's generic ones; ckptfused's blocks keep all that they can, which changes no bit.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced_checkpoints(_no_replay, _called))
        for module in model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, ConvertedForward):
                kept = forward.mode and forward.mode._replace(keep="all")
                stack.enter_context(mock.patch.multiple(forward, mode=kept, segment=None))
            if isinstance(module, FusedModule):
                stack.enter_context(mock.patch.object(module, "_mode", module._mode._replace(keep="all")))
            # Of a block that stands there twice, the gradients of segments are summed in another order.
            if isinstance(module, FusedCheckpointSequential) and 0 < len(module) == len(set(module)):
                stack.enter_context(mock.patch.object(module, "segments", len(module)))
        yield


def fused(model: nn.Module) -> int:
    """How many layers keep more within `everything_saved`, beside those of PyTorch's checkpoints."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    converted = [f for f in forwards if isinstance(f, ConvertedForward) and f.mode is not None and f.family is not None]
    return len(converted) + sum(isinstance(module, FusedModule) for module in model.modules())


def _no_replay(plain: Any) -> Callable[..., Any]:
    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        # ckptfused's generic checkpoint puts hooks of its own around those of PyTorch's.
        ours = type(function).__module__.startswith("ckptfused.generic")
        with saved_tensors_hooks(Tensor.detach, lambda t: t) if ours else contextlib.nullcontext():
            yield

    return generator


def _called(plain: Any) -> Callable[..., Any]:
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)

    return apply
