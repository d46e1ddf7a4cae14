"""Dispatch keys, modes and transforms of this thread. PyTorch 2.11 to 2.13 have every name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor as FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

from ckptfused.compat.torch_compile import load_dynamo

below_autograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context in which operations go past autograd, whose kernel is at work. `_AutoDispatchBelowAutograd`."""
has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operation, by name, has a kernel at a key, by name. `_dispatch_has_kernel_for_dispatch_key`."""
operations: Any = torch._C._dispatch_get_all_op_names
"""The names of all operations. `_dispatch_get_all_op_names`."""


_DISPATCHING = ("/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
"""Files whose functions stand between an op's caller and a mode."""


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that sees nothing of Dynamo's import. `torch.utils._python_dispatch`."""

    def __enter__(self) -> Any:
        load_dynamo()
        return super().__enter__()


def schema_of(op: Any) -> Any:
    """The arguments and returns of an operation, and whether it writes to any. `OpOverload._schema`."""
    return op._schema


def tensors_of(*values: Any) -> list[Tensor]:
    """Tensors among an operation's arguments or results, which a mode gets in tuples, lists and dictionaries alone."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What an op writes of its arguments."""
    for place, argument in enumerate(schema_of(func).arguments if schema_of(func).is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def cpu_keys() -> Any:
    """The keys of a plain CPU tensor, for `redispatch`. `DispatchKeySet`."""
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def dispatch_modes() -> Sequence[Any]:
    """The active `TorchDispatchMode`s. `_get_current_dispatch_mode_stack`, asked for where `in_dispatch_mode`."""
    return _get_current_dispatch_mode_stack() if in_dispatch_mode() else ()


def in_dispatch_mode() -> bool:
    """Whether a `TorchDispatchMode` is active. `_len_torch_dispatch_stack`."""
    return torch._C._len_torch_dispatch_stack() > 0


def called_by_autograd() -> bool:
    """Whether autograd itself has called the op that a mode of ours sees, not Python code in a hook of a backward.
    `graph._engine_run_backward`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_DISPATCHING)
    ):
        frame = frame.f_back
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context without `TorchDispatchMode`s. `_disable_current_modes`."""
    return _disable_current_modes()


@contextmanager
def without_modes_and_transforms() -> Iterator[None]:
    """The same, without `TorchFunctionMode`s, subclasses' own functions and torch.func either. `_DisableFuncTorch`."""
    with _disable_current_modes(), torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction():
        yield


def function_modes() -> list[Any]:
    """The active `TorchFunctionMode`s. `_get_function_stack_at`."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def in_transform() -> bool:
    """Whether torch.func or forward-mode differentiation is at work. `_are_functorch_transforms_active`,
    `forward_ad._current_level`."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_transformed(t: Tensor) -> bool:
    """Whether a transform of torch.func wraps this tensor. `is_functorch_wrapped_tensor`."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


class LegacyBatch:
    """The batch over which `is_grads_batched` and `vectorize=True` map, by the forerunner of `torch.vmap`.

    `_vmapmode_increment_nesting`, `is_legacy_batchedtensor`, `_remove_batch_dim`, `_add_batch_dim`.
    """

    def __init__(self) -> None:
        self._level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

    @staticmethod
    def holds(t: Any) -> bool:
        """Whether a value is a tensor of the batch."""
        return isinstance(t, Tensor) and torch._C._functorch.is_legacy_batchedtensor(t)

    def opened(self, t: Tensor) -> Tensor:
        """A tensor of the batch, with the batch as its first dimension."""
        return torch._remove_batch_dim(t, self._level, 1, 0)

    def closed(self, t: Tensor) -> Tensor:
        """A tensor of the batch again, from one whose first dimension is the batch."""
        return torch._add_batch_dim(t, 0, self._level)
