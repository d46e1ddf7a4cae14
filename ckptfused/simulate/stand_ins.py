"""Stand-ins for PyTorch's functions that on tensors without data do not choose as on real ones: the same, as far as
memory goes.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.patches import Make, instead, patched_attribute

aten = torch.ops.aten
_IS_META: Any = Tensor.is_meta
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


@contextmanager
def planned_device(kind: str, capability: tuple[int, int]) -> Iterator[None]:
    """A context in which a model's code that asks a tensor without data for the kind of its device (`x.is_cuda`,
    `x.device.type`) is told the planned one, "cpu" or "cuda". PyTorch's code and ours know what it is. What a GPU can
    do is asked of the planned one, too."""

    def flag(value: bool) -> Callable[[FrameType], bool]:
        return lambda frame: value

    def device(frame: FrameType) -> torch.device | None:  # such tensors are made on the device that they say
        return torch.device(kind) if _read_next(frame.f_code, frame.f_lasti) == "type" else None

    answers: dict[str, Callable[[FrameType], Any]] = {
        **{"is_cpu": flag(kind == "cpu"), "is_cuda": flag(kind == "cuda"), "is_meta": flag(False)},
        "device": device,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patched_attribute(Tensor, name, _told_to_models(answer)))
        if kind == "cuda":
            able = instead(lambda *device: capability)
            stack.enter_context(patched_attribute(torch.cuda, "get_device_capability", able))
        yield


def _told_to_models(answer: Callable[[FrameType], Any]) -> Make:
    """What makes a property of tensors with another value for a model's code, in this thread, of tensors without data;
    None: with its own."""
    mine = threading.get_ident()

    def around(plain: Any) -> property:
        def told(t: Tensor) -> Any:
            caller = sys._getframe(1)
            if threading.get_ident() == mine and _IS_META.__get__(t) and _is_a_models(caller):
                found = answer(caller)
                if found is not None:
                    return found
            return plain.__get__(t)

        return property(told)

    return around


def _is_a_models(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ckptfused")


def _read_next(code: CodeType, place: int) -> str:
    """The attribute that is read of what the instruction at a place leaves; "" if something else is done with it."""
    after = _instructions(code)
    return next((name for at, name in after if at > place), "")


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> tuple[tuple[int, str], ...]:
    """The places of instructions, with the names of the attributes that they read."""
    return tuple((one.offset, one.argval if one.opname == "LOAD_ATTR" else "") for one in dis.get_instructions(code))
