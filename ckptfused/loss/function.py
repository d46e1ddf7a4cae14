"""`linear_cross_entropy`: checks, then one op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused._extension import _C  # registers the ops, too
from ckptfused.checks import check_generator, compute_word, transformed
from ckptfused.compat.torch_compile import constant_result
from ckptfused.eager.loss import eager_linear_cross_entropy
from ckptfused.loss.arguments import HeadAdapter, HeadWeight, check_arguments, parts_of
from ckptfused.ops import (
    enclosing_checkpoint,
    loss_second_order,  # noqa: F401  (registers the Autograd kernel)
)
from ckptfused.sizes import parse_bytes
from ckptfused.spec import HEAD, Adapter, LossSpec, Quantized, parse_loss
from ckptfused.spec.checks import check_choice, check_flag

REDUCTIONS = ("mean", "sum", "none")
_OP = torch.ops.ckptfused.linear_cross_entropy.default  # a name without its overload is looked up at each call


class LossOutput(NamedTuple):
    """A loss with what its pass found out about each token, detached.

    **Shapes** loss: none, or as target where nothing is reduced. token_loss (0 where the target is ignored), lse (the
    log-sum-exp of the logits): as target, float32 (float64 for float64 x). predicted: the class with the largest logit,
    as target, int64.
    """

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    predicted: Tensor


_Lora = tuple[tuple[int, float, float], ...]


def _checked_text(
    reduction: str,
    outside: bool,
    softcap: float | None,
    logit_scale: float,
    scratch: int | str | None,
    keep: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    adapters: _Lora,
    stored: tuple[tuple[Any, ...], int] | None,
) -> str:
    same = {"keep": keep, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    options = spec_options(reduction, softcap, scratch, **same, logit_scale=logit_scale, z_loss=z_loss)
    lora = tuple(Adapter(HEAD, *adapter) for adapter in adapters)
    if stored is not None:
        options |= {"quant": (Quantized(HEAD, *stored[0]),), "classes": stored[1]}
    return LossSpec(**{**options, "reduction": "sum"} if outside else options, lora=lora).to_string()


_known_text = lru_cache(maxsize=1024, typed=True)(_checked_text)  # typed: True is no 1, and refused


@constant_result
def _text(*options: Any) -> str:
    """The spec's text. From plain values, so that torch.compile can fold it; checked here, once."""
    try:
        return _known_text(*options)
    except TypeError:  # of a value that cannot be hashed, too: the check says what it should be
        return _checked_text(*options)


def _plain_value(value: Any) -> Any:
    """The value. torch.compile, which may trace a number as a symbol, must know what is hashed."""
    return next(iter({value}))


def spec_options(reduction: str, softcap: float | None, scratch: int | str | None, **same: Any) -> dict[str, Any]:
    """The fields of `LossSpec` by the options of `linear_cross_entropy`; same: those that are fields as they are."""
    check_choice("reduction", reduction, REDUCTIONS)
    return {
        **same,
        "reduction": reduction,
        "softcap": 0.0 if softcap is None else softcap,
        "scratch": 0 if scratch is None else parse_bytes("scratch", scratch),
    }


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | HeadWeight,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    keep: str = "gradients",
    scratch: int | str | None = None,
    adapters: Sequence[HeadAdapter] = (),
    shift: bool = False,
    return_tokens: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor | LossOutput:
    """`cross_entropy(linear(x, weight, bias), target)` without ever holding the logits.

    Logits exist a piece at a time; a row's loss and its gradient are made in one visit, the gradient in the logits'
    place. Softmax, losses and sums over tokens are in float32 (float64 for float64 x), which is the loss's type.

    **Shapes** x [..., C] and weight [V, C], float64, float32, bfloat16 or float16, of one type (any under autocast);
    target [...], int64: a class, or `ignore_index`. bias, class_weight: [V]. Result: none; with `reduction="none"` as
    target. A weight in few bits is a `HeadWeight`.

    reduction: "mean" divides by the number of targets that are not ignored (by the sum of their class weights), "sum"
    by nothing; "none" gives each token's loss, and always keeps the inputs. num_items: divides the sum instead of the
    mean's own number, as a trainer does that accumulates over batches: an int, a float or a tensor with one number.
    softcap c: logits l become c·tanh(l/c) (Gemma 2); logit_scale multiplies them before (Cohere; 1/16 for Granite's
    16). z_loss: adds z_loss · lse² to each token's loss before it is reduced.
    keep: "gradients" makes those of x, weight, bias and adapters in forward, three products in all; "inputs" makes the
    logits again in backward, four products. scratch: bytes of logits at a time, an int or "64MiB"; None: 32 MiB
    or 512 rows, on CUDA 256 MiB or 1,024 rows, whichever is more, but of rows no more than C / 2. A function of shape,
    type, device and this number decides the pieces. Where the sums over pieces would
    need more than pieces save (the float32 gradient of a half-precision weight), there is one piece.
    adapters: LoRA beside the weight, with ckptfused's own dropout masks. shift: the target of a position is the next
    position's, as of causal language models; x is not copied. return_tokens: a `LossOutput` in place of the loss.
    generator: the source of dropout's seed.

    **Saves** x and the caller's own tensors, and with "gradients" dx and, where they are trained, gradients of weight,
    bias and adapters; with "inputs" 4 bytes a token (the log-sum-exp).
    **Recomputes** with "inputs" the logits; in each pass the numbers of a weight in few bits. A second derivative runs
    through plain PyTorch.
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came; `IndexError` for a
    target that is no class (on CUDA, where nobody waits for it, its loss is NaN).
    **Source** `torch.nn.functional.cross_entropy`, and PyTorch 2.13's `linear_cross_entropy`, whose `linear_weight`,
    `linear_bias` and `weight` are weight, bias and class_weight here; gradients in forward: Hsu et al. 2024 (Liger,
    arXiv 2410.10989).
    """
    compiling = torch.compiler.is_compiling()
    matrix, stored, beside = parts_of(weight)
    more = compiling or stored is not None or len(adapters) > 0 or num_items is not None
    if more or not _C.loss_arguments_fit(x, weight, target, bias, class_weight):
        check_arguments(x, weight, target, bias, class_weight, adapters, reduction, num_items)
    if not compiling and not (shift is False and return_tokens is False):  # Dynamo traces no error of ours
        check_flag("shift", shift)
        check_flag("return_tokens", return_tokens)
    if shift and target.dim() == 0:
        raise ValueError("shift: expected a sequence of targets, got a single one")
    check_generator(generator)
    if shift:
        target = F.pad(target[..., 1:], (0, 1), value=ignore_index)[..., : target.size(-1)]
    plainly = transformed()
    # Divided by something else than the number of targets, and under transforms: outside of the op.
    outside = num_items is not None or (reduction == "mean" and (class_weight is not None or plainly))
    numbers = (softcap, logit_scale, scratch, keep, ignore_index, label_smoothing, z_loss)
    lora_options = tuple((lora.a.size(0), lora.scale, lora.p) for lora in adapters)
    if compiling:
        reduction, *rest = (_plain_value(value) for value in (reduction, *numbers))
        numbers = tuple(rest)  # type: ignore[assignment]
        lora_options = tuple(
            (_plain_value(rank), _plain_value(scale), _plain_value(p)) for rank, scale, p in lora_options
        )
    text = _text(reduction, outside, *numbers, lora_options, stored)
    tensors = [*(t for lora in adapters for t in (lora.a, lora.b, lora.bias)), *beside]
    if plainly:
        spec = parse_loss(text + compute_word(x, residual=False))
        made = eager_linear_cross_entropy(x, matrix, bias, target, class_weight, tensors, spec)
    else:
        if not compiling and any(lora.p for lora in adapters):
            generator = enclosing_checkpoint.source(x, generator)
        direct = None if more else _C.linear_cross_entropy(x, matrix, bias, target, class_weight, text)
        made = direct or _OP(x, matrix, bias, target, class_weight, tensors, text, generator=generator)
    loss = _divided(made[0], num_items, target, ignore_index, class_weight) if outside else made[0]
    return LossOutput(loss, *made[1:]) if return_tokens else loss


def _divided(
    loss: Tensor, num_items: float | Tensor | None, target: Tensor, ignore_index: int, class_weight: Tensor | None
) -> Tensor:
    """The mean, or the sum by `num_items`. Where no target counts and that is 0, it is NaN and its gradients are 0, as
    PyTorch's: theirs never reach an ignored token, while ours would be 0 times the inf of a division by 0."""
    counted = target != ignore_index
    number: Any = num_items.reshape(()).to(loss.dtype) if isinstance(num_items, Tensor) else num_items
    if number is None and class_weight is None:
        number = counted.sum()
    elif number is None:
        number = class_weight.to(loss.dtype)[target.where(counted, 0)].where(counted, 0).sum()  # type: ignore[union-attr]
    elif not isinstance(number, Tensor) and number != 0:
        return loss / number
    nothing = ~counted.any()
    return torch.where(nothing & (number == 0), loss.detach() / number, loss / torch.where(nothing, 1, number))
