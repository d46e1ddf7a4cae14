"""The forward that a language model gets whose loss is made without its logits, and how it is put in and taken out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checks import is_dtensor, transformed
from ckptfused.compat.accelerate import BELOW_AUTOCAST, BELOW_HOOKS
from ckptfused.compat.torch_compile import constant_result
from ckptfused.compat.torch_modules import forward_hooks, forward_pre_hooks, has_backward_hooks
from ckptfused.compat.transformers import output_class
from ckptfused.layer.hooks import EVERYWHERE, hooked_everywhere
from ckptfused.layer.parts import Reason
from ckptfused.layer.projections import Projection, projection
from ckptfused.layer.quantized import is_quantized
from ckptfused.layer.shards import is_fully_sharded
from ckptfused.layer.source import class_as_read, class_name, is_patched, unread
from ckptfused.loss import HeadAdapter, HeadWeight, linear_cross_entropy
from ckptfused.models.heads import final_norm
from ckptfused.models.heads.lm_heads import HEADS, head_of
from ckptfused.ops.call import checked_before_backward


@constant_result
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    return _names(forward)


@lru_cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@constant_result
def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


class HeadForward:
    """The `forward` of a language model whose logits never exist as a whole, where nobody can want them: in training,
    with labels. Any other call runs the model's own.

    As `ConvertedForward` an attribute of the instance, that looks everything up at the call.
    """

    __name__ = "forward"

    def __init__(self, model: Any, scratch: int | None) -> None:
        self.model = model
        self.scratch = scratch
        self.paused = False
        """Whether the model's own forward runs: within `original`, and once reverted below a wrapper that still calls
        this.
        """

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What Trainer and `generate` read the names of the arguments from."""
        return MethodType(type(self.model).forward, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # accelerate's unwrap_model made a method of this
            args = args[1:]
        found = Reason("the original is asked for") if self.paused else self._chunked(args, kwargs)
        if not isinstance(found, Reason):
            return found
        return type(self.model).forward(self.model, *args, **kwargs)

    def _chunked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs with a loss and no logits, or why this call runs as it was."""
        model = self.model
        if not model.training or not torch.is_grad_enabled() or transformed():
            return Reason("it does not train")
        given = {**dict(zip(_arguments(type(model).forward), args, strict=False)), **kwargs}
        labels, kept = given.pop("labels", None), given.pop("logits_to_keep", 0)
        if labels is None or not isinstance(kept, int) or kept != 0:
            return Reason("no labels are given, or logits are asked for")
        as_dict = given.pop("return_dict", None)
        if not (model.config.return_dict if as_dict is None else as_dict):
            return Reason("a tuple is asked for, in which the logits have their place")
        head = self.head()
        if isinstance(head, Reason):
            return head
        family = HEADS[class_name(type(model))]
        module: Any = family.head(model)
        alone = _sharded_alone(module)
        if is_dtensor(head.weight) and not alone:
            return Reason("the head's weight is in shards that nobody gathered")
        outputs = family.call_body(model, given)
        x = family.transform(model, outputs.last_hidden_state)
        options = _shaped(family.options(model, labels.to(x.device), given), x)

        def loss_of(x: Tensor) -> Any:
            weight, bias = (module.weight, module.bias) if alone else (head.weight, head.bias)
            if head.stored is not None:
                weight = HeadWeight(weight, *head.stored[:3])
            adapters = [HeadAdapter(*adapter) for adapter in head.adapters]
            made: Any = linear_cross_entropy(x, weight, bias=bias, adapters=adapters, scratch=self.scratch, **options)
            check = None if head.stored is None else head.stored.check
            return checked_before_backward(made, () if check is None else (check,))

        loss = _called(module, loss_of, x) if alone else loss_of(x)
        cls = output_class(family.output)
        fields = {name: getattr(outputs, name, None) for name in _fields(cls) if name != "logits"}
        return cls(**fields | family.more(model, outputs, loss, given))

    def head(self) -> Projection | Reason:
        """The projection to the logits, or why the model's own forward runs."""
        model = self.model
        family, cls = head_of(model), type(model)
        if family is None:
            return Reason("no adapter for this class")
        if not class_as_read(cls, cls.forward):
            return Reason(f"the code of {unread(cls, cls.forward)} is not the one that was read (see tested versions)")
        if hooked_everywhere():
            return EVERYWHERE
        if (why := family.refusal(model)) is not None:
            return why
        module: Any = family.head(model)
        if _sharded_alone(module):
            return Projection(module.weight, module.bias)
        found = projection(module, "the head", model.get_input_embeddings().weight.dtype)
        if isinstance(found, Reason):
            return found
        return Reason("its weight is transposed") if found.transposed else found


def _sharded_alone(module: nn.Module) -> bool:
    """Whether a linear head is sharded by itself, or with other modules, and nobody but FSDP watches it."""
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    others = has_backward_hooks(module) or "forward" in vars(module)
    return (
        is_fully_sharded(module)
        and type(module).__bases__[-1] is nn.Linear
        and not others
        and all(getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.") for hook in hooks)
    )


def _called(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Calls a module with another forward: its hooks, FSDP's, gather its weights and give back their gradients."""
    module.forward = forward  # type: ignore[assignment]
    try:
        return module(x)
    finally:
        del module.forward


def _shaped(options: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Options whose target has the shape of x's tokens, where it has as many: the models' losses flatten both."""
    target, shape = options["target"], x.shape[:-1]
    if target.shape == shape or target.numel() != shape.numel() or target.dim() == 0:
        return options
    if options.get("shift"):  # as they do, and so from one sequence into the next
        target = nn.functional.pad(target[..., 1:], (0, 1), value=options["ignore_index"])
    return {**options, "target": target.reshape(shape), "shift": False}


# Where a model's forward is, and where accelerate keeps the one that it put its own around.
_PLACES = ("forward", BELOW_AUTOCAST, BELOW_HOOKS)


def _held(model: nn.Module, place: str) -> HeadForward | None:
    held = vars(model).get(place)
    held = getattr(held, "__func__", held)
    return held if isinstance(held, HeadForward) else None


def installed(model: nn.Module) -> HeadForward | None:
    """The `HeadForward` of a model, be it below another library's wrapper; None if it has none."""
    return next((found for place in _PLACES if (found := _held(model, place)) is not None), None)


def take_out(model: nn.Module) -> bool:
    """Gives a model, or the norm before its head, its own forward back. Returns whether a model had another."""
    final_norm.take_out(model)
    found = installed(model)
    if found is None:
        return False
    if _held(model, "forward") is found:
        del model.forward
    else:
        found.paused = True
    return True


def put_in(model: nn.Module, scratch: int | None) -> Reason | None:
    """Has the loss of a model, which was taken out before, made without its logits; or says why not."""
    below = installed(model)
    if below is None and is_patched(model):
        return Reason("its forward is not its class's: convert before accelerate, or whoever else, wraps it")
    found = HeadForward(model, scratch) if below is None else below
    head = found.head()
    if isinstance(head, Reason) and not (head.original or _is_stored(model)):  # which is another thing at each call
        return head
    found.scratch, found.paused = scratch, False
    if below is None:
        model.forward = found  # type: ignore[assignment]
    final_norm.put_in(HEADS[class_name(type(model))].final_norm(model))
    return head if isinstance(head, Reason) and not head.original else None


def _is_stored(model: Any) -> bool:
    """Whether the head's weight is in few bits: by the type in which it computes it may be chunked under autocast."""
    family = head_of(model)
    module: Any = None if family is None else family.head(model)
    return module is not None and is_quantized(getattr(module, "base_layer", module))
