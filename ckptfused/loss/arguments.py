"""What a loss head is given beside x, and the checks of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused.checks import check_dtype, check_input, check_param, check_plain, check_stored
from ckptfused.spec import HEAD, QUANT_SLOTS, Quantized
from ckptfused.spec.checks import check_number
from ckptfused.spec.quantized import checked_quantized


class HeadAdapter(NamedTuple):
    """A low-rank adapter beside the head (LoRA): logits += scale * (b(a(drop(x))) + bias).

    **Shapes** a [rank, C], b [V, rank], bias [V] or None. p: dropout of x; 0 where the adapter is in eval.
    **Source** Hu et al. 2021 (arXiv 2106.09685), section 4.1; `peft.tuners.lora.Linear`.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    p: float = 0.0


class HeadWeight(NamedTuple):
    """The weight [V, C] of a head that is stored in few bits, and frozen: numbers while a pass runs, and no longer.

    **Shapes** as `ckptfused.spec.Quantized` says of codes and of what stands beside them; shape: of the numbers.
    """

    codes: Tensor
    form: tuple[Any, ...]
    """kind, block, nested, scales, strided of `ckptfused.spec.Quantized`; the last ones may be left out."""
    state: tuple[Tensor | None, ...]
    """scale, offset, nested_scale, table."""
    shape: tuple[int, ...]


def parts_of(
    weight: Tensor | HeadWeight,
) -> tuple[Tensor, tuple[tuple[Any, ...], int] | None, tuple[Tensor | None, ...]]:
    """The tensor that the op takes as the weight; of codes also form, number of classes and what is beside them."""
    if isinstance(weight, HeadWeight):
        return weight.codes, (weight.form, weight.shape[0]), weight.state
    return weight, None, ()


def check_arguments(
    x: Tensor,
    weight: Tensor | HeadWeight,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    adapters: Sequence[HeadAdapter],
    reduction: str,
    num_items: float | Tensor | None,
) -> None:
    """Raise as `linear_cross_entropy` does of its tensors and adapters."""
    check_plain("x", x)
    if isinstance(weight, Tensor):
        check_plain("weight", weight)
    check_plain("target", target)
    if len(weight.shape) != 2 or x.dim() < 1 or x.size(-1) != weight.shape[1]:
        raise ValueError(f"x, weight: expected [..., C] and [V, C], got {list(x.shape)} and {list(weight.shape)}")
    check_input(x.view(-1, 1) if x.dim() == 1 else x.flatten(0, -2), None)
    classes, width = weight.shape
    if classes == 0:
        raise ValueError("weight: expected at least one class, got shape [0, C]")
    if isinstance(weight, HeadWeight):
        _check_stored(weight, x)
    else:
        check_param("weight", weight, (classes, width), x)
        check_dtype("weight", weight, x)
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected int64 (probabilities of classes are not supported), got {target.dtype}")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target: expected shape {list(x.shape[:-1])}, as x without its last, got {list(target.shape)}"
        )
    if target.device != x.device:
        raise ValueError(f"target: expected x's device {x.device}, got {target.device}")
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None:
            check_param(name, vector, (classes,), x)
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("class_weight: expected a tensor that needs no gradient, got one that requires it")
    for i, lora in enumerate(adapters):
        if not isinstance(lora, HeadAdapter):
            raise TypeError(f"adapters[{i}]: expected a HeadAdapter, got {type(lora).__name__}")
        rank = lora.a.size(0)
        check_param(f"adapters[{i}].a", lora.a, (rank, width), x)
        check_param(f"adapters[{i}].b", lora.b, (classes, rank), x)
        if lora.bias is not None:
            check_param(f"adapters[{i}].bias", lora.bias, (classes,), x)
    if num_items is not None:
        if reduction == "none":
            raise ValueError("num_items: leave it out with reduction='none', which divides by nothing")
        if isinstance(num_items, Tensor):
            if num_items.numel() != 1:
                raise ValueError(f"num_items: expected a tensor with one number, got shape {list(num_items.shape)}")
        elif not torch.compiler.is_compiling():  # which may trace it as a symbol
            check_number("num_items", num_items)


def _check_stored(weight: HeadWeight, x: Tensor) -> None:
    (quant,) = checked_quantized("weight", (Quantized(HEAD, *weight.form),), (HEAD,), transposed=False)
    sizes = quant.sizes(*weight.shape)
    for slot, t in zip(("w", *QUANT_SLOTS), (weight.codes, *weight.state), strict=True):
        if (t is None) != (slot not in sizes):
            expected = "a tensor" if slot in sizes else "None"
            raise ValueError(f"weight: {slot}: expected {expected} of {quant.kind}, got {t!r}")
        if t is not None:
            check_stored(f"weight: {slot}", t, sizes[slot], x)
