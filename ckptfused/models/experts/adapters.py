"""PEFT's LoRA on the weights of experts (`target_parameters`), as the op adds it: to each expert's own rows.

PEFT adds A and B to the whole stack of weights at each forward, and its backward makes a gradient of the whole stack.
Here neither is made: the outermost of PEFT's wrappers around a module of experts gets a forward that calls the op.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.peft import PARAM_WRAPPER
from ckptfused.layer.hooks import EVERYWHERE, hooked, hooked_everywhere
from ckptfused.layer.parts import Reason
from ckptfused.layer.peft import dropout_rate, is_lora
from ckptfused.layer.source import class_name
from ckptfused.models.experts.read import SMALL, nearly_equal, on_small_weights, small_experts, trying
from ckptfused.spec.experts import ExpertsSpec


class Adapters(NamedTuple):
    """What the wrappers around a module of experts add at a call."""

    tensors: tuple[Tensor | None, ...]
    """up_a, up_b, down_a and down_b, as the op takes them."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Their scales and rates of dropout, by the names of the op's spec."""


class _Pair(NamedTuple):
    a: Tensor
    b: Tensor
    scale: float
    p: float


NO_ADAPTERS = Adapters(())


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of one that holds an adapted parameter."""
    return class_name(type(module)) == PARAM_WRAPPER


def adds_adapters(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of its `base_layer`: of a projection, or of one that holds an adapted
    parameter."""
    return is_lora(module) or is_wrapper(module)


def wrapped(module: Any) -> nn.Module:
    """What wrappers of adapted parameters are around; any other module itself."""
    while is_wrapper(module):
        module = module.base_layer
    return module  # type: ignore[no-any-return]


def drops(wrapper: Any, now: bool = True) -> bool:
    """Whether adapters on parameters have dropout, which PEFT's own forward leaves out. now: at this call; if not,
    whenever they are trained."""
    while is_wrapper(wrapper):
        if not (wrapper.disable_adapters or wrapper.merged):
            dropouts = (wrapper.lora_dropout[name] for name in _active(wrapper))
            if any(_drops(module) and (module.training or not now) for module in dropouts):
                return True
        wrapper = wrapper.base_layer
    return False


def _drops(module: nn.Module) -> bool:
    return type(module) is not nn.Identity and (type(module) is not nn.Dropout or module.p > 0)


def _active(wrapper: Any) -> list[str]:
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def read_adapters(wrapper: Any) -> Adapters | Reason:
    """What is added at this call, or why PEFT has to do it. wrapper: the outermost."""
    if hooked_everywhere():
        return EVERYWHERE
    base: Any = wrapped(wrapper)
    pairs: dict[str, _Pair] = {}
    module = wrapper
    while is_wrapper(module):
        if module is not wrapper and hooked(module):
            return Reason("an inner wrapper has a hook or a forward of its own")
        if module.disable_adapters or module.merged:
            return Reason("its adapters are merged or switched off")
        names = _active(module)
        if len(names) > 1 or module.parameter_name in pairs:
            return Reason("several adapters on one weight")
        for name in names:
            found = _pair(module, name)
            if isinstance(found, Reason):
                return found
            pairs[module.parameter_name] = found
        module = module.base_layer
    if hooked(base):
        return Reason("the experts have a hook or a forward of their own")
    stem = "gate_up_proj" if base.has_gate else "up_proj"
    if not pairs.keys() <= {stem, "down_proj"}:
        return Reason(f"an adapter on {', '.join(pairs)}")
    tensors: list[Tensor | None] = []
    numbers: dict[str, float] = {}
    for side, parameter in (("up", stem), ("down", "down_proj")):
        pair = pairs.get(parameter)
        tensors += (None, None) if pair is None else pair[:2]
        if pair is not None:
            numbers |= {f"{side}_scale": pair.scale, f"{side}_p": pair.p}
    return Adapters(tuple(tensors), tuple(numbers.items()))


def _pair(module: Any, name: str) -> _Pair | Reason:
    """A [E, r, in] and B [E, out, r] of an adapter, its scale and its dropout.

    PEFT refuses to make dropout on experts, which its merged weights could not have: an `nn.Dropout` stands among its
    `lora_dropout` where a user put it.
    """
    a, b, scale, dropout = (each[name] for each in (module.lora_A, module.lora_B, module.scaling, module.lora_dropout))
    if name in module.lora_variant or module.lora_bias.get(name) or module.num_experts == 1:
        return Reason("an adapter of another kind than A and B for each expert")
    if not (type(a) is type(b) is nn.Linear) or any(map(hooked, (a, b, dropout))):
        return Reason("an adapter whose A or B is no plain Linear, or with a hook on these or its dropout")
    if any(type(t) not in (Tensor, nn.Parameter) for t in (a.weight, b.weight)):
        return Reason("an adapter in shards")
    if isinstance(p := dropout_rate(dropout), Reason):
        return p
    if isinstance(scale, Tensor):
        return Reason("an adapter's scale is a tensor (PEFT's hotswap)")
    count = module.num_experts
    return _Pair(
        a.weight.unflatten(0, (count, -1)), b.weight.unflatten(1, (-1, count)).permute(2, 0, 1), float(scale), p
    )


def unproved(wrapper: Any, spec: ExpertsSpec) -> Reason | None:
    """Why a wrapper's own forward is kept: as its adapters are now, or since on small weights it computes something
    else than A and B added to each expert's products."""
    if hooked(wrapper):
        return Reason("PEFT's wrapper has a hook or a forward of its own")
    if isinstance(found := read_adapters(wrapper), Reason):
        return found
    try:
        with trying():
            base: Any = wrapped(wrapper)
            small = _small(wrapper, small_experts(base))
            found = read_adapters(small)
            if isinstance(found, Reason):
                return found
            x, ids, scores = SMALL.call()
            adapted = spec.with_adapters(found.numbers)  # whose dropout has no masks here
            ours = on_small_weights(wrapped(small), x, ids, scores, found.tensors, adapted)
            same = nearly_equal(type(wrapper).forward(small, x, ids, scores), ours)
            return None if same else Reason("PEFT adds something else than A and B")
    except Exception as error:  # of code that was not read
        return Reason(f"PEFT's wrapper could not be tried on small weights ({type(error).__name__}: {error})")


def _small(wrapper: Any, base: nn.Module) -> Any:
    """A shallow copy of a wrapper around these experts, with adapters of their size in float64."""
    if not is_wrapper(wrapper):
        return base
    small = copy.copy(wrapper)
    vars(small)["_modules"] = {**wrapper._modules, "base_layer": _small(wrapper.base_layer, base)}
    small.num_experts = SMALL.experts
    into, out = small.get_param().shape[1:]
    if not wrapped(wrapper).is_transposed:
        into, out = out, into
    made: dict[str, dict[str, nn.Module]] = {"lora_A": {}, "lora_B": {}}
    for name, rank in wrapper.r.items():
        if name in wrapper.lora_A:
            made["lora_A"][name] = nn.Linear(into, rank * SMALL.experts, bias=False, dtype=torch.float64)
            made["lora_B"][name] = nn.Linear(rank * SMALL.experts, out, bias=False, dtype=torch.float64)
    small._modules |= {name: nn.ModuleDict(modules) for name, modules in made.items()}
    return small
