"""Stand-ins for PyTorch's functions that on tensors without data do not choose as on real ones: the same, as far as
memory goes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.patches import instead, patched_attribute
from ckptfused.compat.torch_memory import storage_id

aten = torch.ops.aten
_IS_META: Any = Tensor.is_meta
_TYPE: Any = Tensor.type
Noted = Callable[[float, Tensor, Tensor], None]
"""Told of work by how often it is a forward's, and two operands of it."""


def nowhere(share: float, a: Tensor, b: Tensor) -> None:
    """Takes no note of work."""


class _Flash(torch.autograd.Function):
    """A flash kernel: it saves q, k, v, o, a number a row, and the bias that it is given.

    scratch: bytes that forward takes beside its results, and backward beside the gradients. Backward makes five
    products where forward makes two, and copies a gradient that is not token by token in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scratch: tuple[int, int],
        noted: Noted,
        lse: torch.dtype,
    ) -> Tensor:
        o = torch.empty_like(q) if v.size(-1) == q.size(-1) else _by_token(q, v.size(-1))
        ctx.save_for_backward(q, k, v, o, q.new_empty(q.shape[:-1], dtype=lse), bias)
        q.new_empty(scratch[0], dtype=torch.uint8)
        ctx.scratch, ctx.noted = scratch[1], noted
        noted(1.0, q, k)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        made = [_by_token(t, t.size(-1)) for t in (q, k, v)]
        copy = None if grads[0].transpose(-2, -3).is_contiguous() else grads[0].new_empty(grads[0].shape)
        q.new_empty(ctx.scratch, dtype=torch.uint8)
        del copy
        ctx.noted(2.5, q, k)
        return (*made, None, None, None, None)


def _by_token(like: Tensor, width: int) -> Tensor:
    """Token by token in memory, as kernels write gradients; a result has the layout of q."""
    return like.new_empty(*like.shape[:-3], like.size(-2), like.size(-3), width).transpose(-2, -3)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    scratch: tuple[int, int] = (0, 0),
    noted: Noted = nowhere,
    lse: torch.dtype = torch.float32,
) -> Tensor:
    """Attention by a flash kernel, which saves the logarithm of a row's sum in the type `lse`.

    **Shapes** q [..., H, T, D]; k, v [..., G, S, D]; bias broadcastable to [..., H, T, S].
    """
    return _Flash.apply(q, k, v, bias, scratch, noted, lse)


class GroupNorm(torch.autograd.Function):
    """A group norm of images in `channels_last`, which backward takes, and gradients, as they lie: on a CPU alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        ctx.sizes = *x.shape[:2], x.size(2) * x.size(3), groups
        y, mean, rstd = aten.native_group_norm(x, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = as_it_lies = grads[0]
        if not grad.is_contiguous(memory_format=torch.channels_last):
            as_it_lies = grad.contiguous() if any(grad.stride()) else grad  # one number is laid out at once
            grad = as_it_lies.contiguous(memory_format=torch.channels_last)
        needs = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
        x, weight, bias = aten.native_group_norm_backward(grad, *ctx.saved_tensors, *ctx.sizes, needs)
        del as_it_lies
        return x, None, weight, bias, None


class Selected(torch.autograd.Function):
    """The largest entry of all, the least or the median: `select` finds it. On a CPU the gradient is spread evenly over
    the entries that are equal to it, in place, which PyTorch does not do under a mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
        found = select(x)
        ctx.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, found = ctx.saved_tensors
        found.isnan()
        equal = x == found
        spread = x.new_zeros(x.shape)
        return spread.masked_fill_(equal, grads[0] / equal.sum()), None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offsets: Tensor, noted: Noted) -> Tensor:
        ctx.save_for_backward(rows, weights, offsets)
        ctx.noted = noted
        noted(1.0, rows, weights)
        return rows.new_empty(rows.size(0), weights.size(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights, _ = ctx.saved_tensors
        made = [
            t.new_empty(t.shape) if need else None
            for t, need in zip((rows, weights), ctx.needs_input_grad[:2], strict=True)
        ]
        ctx.noted(float(sum(ctx.needs_input_grad[:2])), rows, weights)
        return (*made, None, None)


def grouped_mm(
    input: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    noted: Noted = nowhere,
) -> Tensor:
    """Products of groups of rows with a matrix each, for `F.grouped_mm` (mixtures of experts), which on tensors without
    data takes bfloat16 only. PyTorch takes no bias yet.
    """
    made: Tensor = _Grouped.apply(input, weight, offs, noted)
    return made if out_dtype is None else made.to(out_dtype)


class _PlannedDevice(str):
    """The planned device, as a model's code sees it. What it makes there has no data: PyTorch reads a device from a
    text, and this one is "meta". Devices that are made of it are that, and equal to it."""

    __class__ = property(lambda self: torch.device)  # type: ignore[assignment]
    type = property(lambda self: self._shown.type)
    index = property(lambda self: self._shown.index)  # type: ignore[assignment]
    _shown: torch.device

    def __new__(cls, shown: torch.device) -> Any:
        made: Any = str.__new__(cls, "meta")
        made._shown = shown
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.device):
            return self._shown == getattr(other, "_shown", other) or other.type == "meta"
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._shown)

    def __str__(self) -> str:
        return "cpu" if self._shown.type == "cpu" else "meta"  # where there is no GPU, nothing is made on "cuda:0"

    def __repr__(self) -> str:
        return repr(self._shown)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> Any:
        return _PlannedDevice, (self._shown,)

    def __enter__(self) -> Any:
        return torch.device("meta").__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.device("meta").__exit__(*error)


@contextmanager
def planned_device(kind: str, capability: tuple[int, int]) -> Iterator[None]:
    """A context in which a model's code that asks a tensor without data where it is (`x.is_cuda`, `x.device`,
    `x.type()`, `x.data_ptr()`) is told of the planned device, "cpu" or "cuda". PyTorch's code and ours know what it is.
    What a GPU can do is asked of the planned one, too."""
    on_cpu = kind == "cpu"
    device = _PlannedDevice(torch.device("cpu") if on_cpu else torch.device("cuda", 0))

    def named(t: Tensor, *cast: Any, **how: Any) -> Any:
        found = _TYPE(t, *cast, **how)
        return found if isinstance(found, Tensor) else found.replace("meta.", "" if on_cpu else "cuda.")

    answers: dict[str, Callable[[Tensor], Any]] = {
        **{"is_cpu": lambda t: on_cpu, "is_cuda": lambda t: not on_cpu, "is_meta": lambda t: False},
        "device": lambda t: device,
        "get_device": lambda t: lambda: -1 if on_cpu else 0,
        "type": lambda t: partial(named, t),
        "data_ptr": lambda t: partial(_address, t),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patched_attribute(Tensor, name, partial(_Told, threading.get_ident(), answer)))
        if not on_cpu:
            able = instead(lambda *device: capability)
            stack.enter_context(patched_attribute(torch.cuda, "get_device_capability", able))
        yield


class _Told:
    """An attribute of tensors with another value for a model's code, in one thread, of tensors without data."""

    def __init__(self, thread: int, answer: Callable[[Tensor], Any], plain: Any) -> None:
        self._thread, self._answer, self._plain = thread, answer, plain

    def __get__(self, t: Tensor | None, owner: Any = None) -> Any:
        if t is None:
            return self._plain
        frame = sys._getframe(1)
        while frame.f_code is _Told.__get__.__code__ and frame.f_back is not None:  # that of another thread's answers
            frame = frame.f_back
        told = threading.get_ident() == self._thread and _IS_META.__get__(t) and _is_a_models(frame)
        return self._answer(t) if told else self._plain.__get__(t, owner)


def _is_a_models(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ckptfused")


def _address(t: Tensor) -> int:
    """An address of no memory: of a line of a cache, like others, and the same for tensors that share their storage."""
    return storage_id(t) * 64 + int(t.storage_offset()) * t.element_size()
