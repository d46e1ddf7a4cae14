"""Weights of a layer that is proved, at any width: random matrices of low rank, which are never made.

A block is linear in each matrix, and a layer's code in whatever a rule takes of it: which product it is of, which way
round, is as plain in a matrix of rank 8 as in any other, and a product with it costs as much as with 16 columns. The
gradients of both factors stand for that of the matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ckptfused.compat.torch_dispatch import tensors_of
from ckptfused.models.derive.recording.names import code_place, function_name, words_of
from ckptfused.models.derive.recording.recorder import LOOKS, RefusedError

RANK = 8
LEAST_FACTORED = 2**14
"""Numbers in a matrix from which on its factors stand for it."""
_TURNS = words_of("t T mT transpose permute swapaxes swapdims")
_CASTS = words_of("to double type type_as contiguous")
_CUTS = words_of("chunk split narrow getitem")


class UnfactoredError(RefusedError):
    """What a layer does to a matrix that is no product with it."""


class Factors(NamedTuple):
    """A matrix `left @ right`: [m, RANK] and [RANK, n]."""

    left: Tensor
    right: Tensor

    @property
    def turned(self) -> Factors:
        """The factors of the transposed matrix."""
        return Factors(self.right.t(), self.left.t())


def stand_in(t: Tensor) -> Tensor | None:
    """What has the shape of a matrix that factors stand for, and no memory; None of other tensors. It holds NaN, which
    no product makes of it that is computed by factors: what comes of it otherwise is not finite.
    """
    if t.dim() != 2 or t.numel() < LEAST_FACTORED:
        return None
    return torch.full((), torch.nan, dtype=torch.float64).expand(t.shape)


class Factored(TorchFunctionMode):
    """Computes products with the stand-ins among a layer's parameters by random factors.

    **Raises** `UnfactoredError` in a call that does anything else with one.
    """

    def __init__(self, layer: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.matrices: dict[int, tuple[Tensor, Factors]] = {}
        """Stand-ins and what was made of them, by identity."""
        for p in layer.parameters():
            if p.dim() == 2 and p.stride() == (0, 0):
                left = torch.randn(p.shape[0], RANK, dtype=p.dtype, generator=generator) / RANK**0.5
                right = torch.randn(RANK, p.shape[1], dtype=p.dtype, generator=generator) / p.shape[1] ** 0.5
                self._note(p, Factors(left.requires_grad_(), right.requires_grad_()))

    def leaves(self, p: Tensor) -> tuple[Tensor, ...]:
        """What gradients are taken of for a parameter's."""
        found = self._of(p)
        return (p,) if found is None else tuple(found)

    def _note(self, t: Tensor, factors: Factors) -> None:
        self.matrices[id(t)] = (t, factors)

    def _of(self, t: Any) -> Factors | None:
        found = self.matrices.get(id(t))
        return None if found is None else found[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.matrices or not any(id(t) in self.matrices for t in tensors_of(args, kwargs)):
            return func(*args, **kwargs)
        op = function_name(func)
        if op in LOOKS:
            return func(*args, **kwargs)
        made = self._product(op, args, kwargs)
        if made is None and args and (whole := self._of(args[0])) is not None:
            made = self._arranged(func, op, whole, args[0], args[1:], kwargs)
        if made is None:
            raise UnfactoredError(f"{code_place()}: {op} of a weight, which is no product with it")
        return made

    def _product(self, op: str, args: Any, kwargs: Any) -> Tensor | None:
        """A product of what is no stand-in with one; None of another call."""
        if op == "linear":
            x, w, bias = (
                args[i] if len(args) > i else kwargs.get(n) for i, n in enumerate(("input", "weight", "bias"))
            )
        elif op in ("matmul", "mm", "rmatmul") and len(args) == 2 and not kwargs:
            (x, w), bias = args if op != "rmatmul" else args[::-1], None
        elif op == "addmm" and len(args) == 3 and not kwargs:
            bias, x, w = args
        else:
            return None
        factors = self._of(w)
        if factors is None or self._of(x) is not None or self._of(bias) is not None:
            return None
        left, right = factors if op != "linear" else factors.turned
        y = torch.matmul(torch.matmul(x, left), right)
        return y if bias is None else y + bias

    def _arranged(self, func: Any, op: str, whole: Factors, t: Tensor, args: Any, kwargs: Any) -> Any:
        """A matrix cast, turned or cut into rows; None of another call."""
        if op in _CASTS:
            return t if func(torch.empty((), dtype=t.dtype), *args, **kwargs).dtype == t.dtype else None
        if op in _TURNS:
            made = func(t, *args, **kwargs)
            self._note(made, whole if func(torch.empty(1, 2), *args, **kwargs).shape == (1, 2) else whole.turned)
            return made
        if op == "narrow" and not kwargs and args[0] in (1, -1):
            made = func(t, *args)
            self._note(made, Factors(whole.left, func(whole.right, *args)))
            return made
        if op in _CUTS and _of_rows(op, args, kwargs):
            made = func(t, *args, **kwargs)
            lefts = func(whole.left, *args, **kwargs)
            for part, left in ((made, lefts),) if isinstance(made, Tensor) else zip(made, lefts, strict=True):
                self._note(part, Factors(left, whole.right))
            return made
        return None


def _of_rows(op: str, args: Any, kwargs: Any) -> bool:
    """Whether a cut of a matrix is one of its rows."""
    if op == "getitem":
        return isinstance(args[0], slice)
    index = 0 if op == "narrow" else 1
    return bool((args[index] if len(args) > index else kwargs.get("dim", 0)) in (0, -2))
