"""Products of heads, however they were written: matmul, bmm, baddbmm, einsum, heads apart or folded into the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value

PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")


class HeadProduct(NamedTuple):
    """A product over heads: y[b, h, i, j] = sum over s of left[b, h, i, s] * right[b, h, s, j]."""

    left: Value
    right: Value
    ends: tuple[Tensor, Tensor, Tensor]
    """left, right and y so arranged."""
    in_order: bool
    """Whether y itself lies so, heads folded into the batch or not."""
    factor: float = 1.0
    added: Value | None = None
    """What is added to it (baddbmm)."""


def by_heads(t: Tensor, batch: int) -> Tensor | None:
    """A tensor of heads as [B, H, ...]; None where it is of another shape."""
    if t.dim() == 3 and t.shape[0] % batch == 0:
        return t.unflatten(0, (batch, -1))
    return t if t.dim() == 4 else None


def token_by_token(t: Tensor, rows: tuple[int, int]) -> Tensor:
    """A tensor token by token, [*rows, W]; that of [B, W, T], beside convolutions, and that of [T, B, W], too."""
    if t.dim() == 3 and t.shape[:2] != rows:
        for turned in (t.transpose(1, 2), t.transpose(0, 1)):
            if turned.shape[:2] == rows:
                return turned
    return t.reshape(*rows, -1)


def head_product(call: Recorded, batch: int, left: Value | None = None) -> HeadProduct:
    """The product that a call is. left: which of its operands stands at the left, where that is known.

    **Raises** `RefusedError` where it is none over heads.
    """
    if call.op == "einsum":
        return _einsum(call, left)
    added, factor, operands = None, 1.0, call.inputs
    if call.op == "baddbmm":
        beta, factor = float(call.given(3, "beta", 1)), float(call.given(4, "alpha", 1))
        added, operands = (operands[0] if beta else None), operands[1:]
        if beta not in (0.0, 1.0):
            raise RefusedError(f"no rule takes {call}", call)
    if call.op not in PRODUCTS or len(operands) != 2:
        raise RefusedError(f"no rule takes {call}", call)
    a, b = (by_heads(v.data, batch) for v in operands)
    if a is None or b is None:
        raise RefusedError(f"no rule takes {call}", call)
    x, y = operands
    return HeadProduct(x, y, (a, b, a @ b), True, factor, added)


def _einsum(call: Recorded, left: Value | None) -> HeadProduct:
    operands = call.inputs
    equation = call.args[0]
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        raise RefusedError(f"no rule takes {call}", call)
    words, out = _letters(equation, [v.data.dim() for v in operands])
    a, b = zip(operands, words, strict=True)
    for (first, x), (second, y) in ((a, b), (b, a)):
        shared = [n for n in out if n in x and n in y]
        row, column = ([n for n in out if n in x and n not in y], [n for n in out if n in y and n not in x])
        summed = [n for n in x if n in y and n not in out]
        told = left is None or first is left
        if not told or len(row) != 1 or len(column) != 1 or len(summed) != 1 or not 1 <= len(shared) <= 2:
            continue
        if set(x) != {*shared, *row, *summed} or set(y) != {*shared, *column, *summed}:
            continue
        rows, columns = [*shared, *row, *summed], [*shared, *summed, *column]
        ends = first.data.permute(*map(x.index, rows)), second.data.permute(*map(y.index, columns))
        return HeadProduct(first, second, (*ends, ends[0] @ ends[1]), out == [*shared, *row, *column])
    raise RefusedError(f"no rule takes {call}", call)


def _letters(equation: str, dims: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letters of operands and result, those of an ellipsis as numbers."""
    taken, _, made = equation.replace(" ", "").partition("->")
    words = taken.split(",")
    spans = [dim - len(word.replace("...", "")) for word, dim in zip(words, dims, strict=True) if "..." in word]

    def opened(word: str) -> list[str]:
        before, dots, after = word.partition("...")
        return [*before, *(map(str, range(max(spans, default=0))) if dots else ()), *after]

    if len(set(spans)) > 1:
        return [[], []], []
    return [opened(word) for word in words], opened(made)


def softmax_last(call: Recorded, dims: int) -> bool:
    """Whether a softmax is over the keys."""
    return call.op == "softmax" and call.given(1, "dim") in (-1, dims - 1)


def merged(inner: Tensor, y: Tensor) -> bool:
    """Whether a tensor holds the heads of y [B, H, T, D] side by side, token by token, in either order of B and T."""
    batch, _, tokens, _ = y.shape
    if inner.numel() != y.numel():
        return False
    want = y.transpose(1, 2).reshape(batch, tokens, -1)
    return any(
        torch.allclose(inner.reshape(made), arranged, rtol=1e-9, atol=1e-12)
        for made, arranged in ((want.shape, want), (want.transpose(0, 1).shape, want.transpose(0, 1)))
    )
