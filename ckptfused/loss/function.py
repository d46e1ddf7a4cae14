"""`linear_cross_entropy`: checks, then one op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused._extension import _C  # registers the ops, too
from ckptfused.checks import (
    check_dtype,
    check_generator,
    check_input,
    check_param,
    check_plain,
    compute_word,
    transformed,
)
from ckptfused.compat.torch_compile import constant_result
from ckptfused.eager.loss import eager_linear_cross_entropy
from ckptfused.ops import (
    enclosing_checkpoint,
    loss_second_order,  # noqa: F401  (registers the Autograd kernel)
)
from ckptfused.sizes import parse_bytes
from ckptfused.spec import HEAD, Adapter, LossSpec, parse_loss
from ckptfused.spec.checks import check_choice, check_flag, check_number

REDUCTIONS = ("mean", "sum", "none")
_OP = torch.ops.ckptfused.linear_cross_entropy.default  # a name without its overload is looked up at each call


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
) -> str:
    same = {"keep": keep, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    options = spec_options(reduction, softcap, scratch, **same, logit_scale=logit_scale, z_loss=z_loss)
    lora = tuple(Adapter(HEAD, *adapter) for adapter in adapters)
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
    weight: Tensor,
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
    target.

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
    **Recomputes** with "inputs" the logits. A second derivative runs through plain PyTorch.
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came; `IndexError` for a
    target that is no class (on CUDA, where nobody waits for it, its loss is NaN).
    **Source** `torch.nn.functional.cross_entropy`, and PyTorch 2.13's `linear_cross_entropy`, whose `linear_weight`,
    `linear_bias` and `weight` are weight, bias and class_weight here; gradients in forward: Hsu et al. 2024 (Liger,
    arXiv 2410.10989).
    """
    compiling = torch.compiler.is_compiling()
    more = compiling or len(adapters) > 0 or num_items is not None
    if more or not _C.loss_arguments_fit(x, weight, target, bias, class_weight):
        _check(x, weight, target, bias, class_weight, adapters, reduction, num_items)
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
    text = _text(reduction, outside, *numbers, lora_options)
    tensors = [t for lora in adapters for t in (lora.a, lora.b, lora.bias)]
    if plainly:
        spec = parse_loss(text + compute_word(x, residual=False))
        made = eager_linear_cross_entropy(x, weight, bias, target, class_weight, tensors, spec)
    else:
        if not compiling and any(lora.p for lora in adapters):
            generator = enclosing_checkpoint.source(x, generator)
        direct = None if more else _C.linear_cross_entropy(x, weight, bias, target, class_weight, text)
        made = direct or _OP(x, weight, bias, target, class_weight, tensors, text, generator=generator)
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


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    adapters: Sequence[HeadAdapter],
    reduction: str,
    num_items: float | Tensor | None,
) -> None:
    check_plain("x", x)
    check_plain("weight", weight)
    check_plain("target", target)
    if weight.dim() != 2 or x.dim() < 1 or x.size(-1) != weight.size(1):
        raise ValueError(f"x, weight: expected [..., C] and [V, C], got {list(x.shape)} and {list(weight.shape)}")
    check_input(x.view(-1, 1) if x.dim() == 1 else x.flatten(0, -2), None)
    classes, width = weight.shape
    if classes == 0:
        raise ValueError("weight: expected at least one class, got shape [0, C]")
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
