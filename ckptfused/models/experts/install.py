"""Experts put into a model, and taken out again: by the one place at which Hugging Face looks for their function.

Each module of experts asks its config for the name of its implementation. A converted one gets a config of its own,
which says "ckptfused" there and is the model's in all else; the class, the config of the model, and models that were
not converted stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_compile import constant_result
from ckptfused.compat.torch_dispatch import function_modes
from ckptfused.compat.transformers import experts_functions, experts_implementation, own_experts_forward
from ckptfused.cost.open_ledger import counting
from ckptfused.layer.parts import Reason
from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.layer.shards import is_fully_sharded
from ckptfused.models.experts.adapters import NO_ADAPTERS, Adapters, drops, is_wrapper, read_adapters, unproved, wrapped
from ckptfused.models.experts.read import COMPUTED_AS_SAID, is_experts, read_experts, unfit, weights_of
from ckptfused.ops.call import checked_before_backward
from ckptfused.ops.experts import experts
from ckptfused.spec import Quantized
from ckptfused.spec.experts import ExpertsSpec, parse_experts

NAME = "ckptfused"
_ROUTING = ("top_k_index", "top_k_weights")
_OTHERWISE = Reason("the experts are called with something else than rows, ids and weights")
WITHOUT_DATA = Reason("nothing is computed on the meta device")


class ExpertsConfig:
    """The config of a model as its experts see it: with an implementation of ours, the rest as it is there."""

    def __init__(self, model: Any, spec: ExpertsSpec) -> None:
        self.model = model
        """The config of the model."""
        self.spec = spec
        self.text = spec.to_string()  # which every Dynamo takes for a constant
        self._experts_implementation = NAME

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "spec", "text"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _register()


def _register() -> None:
    functions = experts_functions()
    if functions is not None and NAME not in functions:
        functions.register(NAME, run)


def run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a converted module of experts: the op, or, where it is not this call's, the module's own."""
    x, ids, weights = hidden_states, top_k_index, top_k_weights
    config: ExpertsConfig = module.config
    if why_original(module, x) is not None:
        own = own_experts_forward(type(module))
        forward = experts_functions().get_interface(experts_implementation(config.model), own)
        # Who reads a layer by a mode knows PyTorch's calls, but not its grouped products without data in float32.
        return (own if _by_mode() else forward)(module, x, ids, weights)  # type: ignore[no-any-return]
    return _by_op(module, x, ids, weights)


def _by_op(module: Any, x: Tensor, ids: Tensor, scores: Tensor, added: Adapters = NO_ADAPTERS) -> Tensor:
    found = weights_of(module)
    spec = _text_of_call(module.config.text, added.numbers, found.quant)
    y = experts(x, ids, scores, *found[:4], added.tensors, found.stored, spec=spec)
    return checked_before_backward(y, found.checks)


@constant_result
def _text_of_call(text: str, numbers: tuple[tuple[str, float], ...], quant: tuple[Any, ...]) -> str:
    """What the same experts compute with these numbers of adapters, and weights that are stored so."""
    return _text(text, numbers, quant)


@lru_cache(maxsize=1024)
def _text(text: str, numbers: tuple[tuple[str, float], ...], quant: tuple[Any, ...]) -> str:
    stacks = tuple(Quantized(*stack) for stack in quant)
    return replace(parse_experts(text), quant=stacks).with_adapters(numbers).to_string()


class AdaptedForward:
    """The forward of the outermost of PEFT's wrappers around a converted module of experts."""

    as_its_class = True
    """`is_patched` asks for it."""

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = wrapper

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The op with the adapters, or, where it is not this call's, PEFT's own forward. **Raises** `RuntimeError` if
        that leaves out dropout."""
        routing = (*args, *(kwargs[name] for name in _ROUTING[len(args) :] if name in kwargs))
        added = self._adapters(x) if len(routing) == len(args) + len(kwargs) == 2 else _OTHERWISE
        if not isinstance(added, Reason):
            ids, scores = routing
            return _by_op(wrapped(self.wrapper), x, ids, scores, added)
        if drops(self.wrapper) and type(x) is Tensor and not x.is_meta and not _is_read():
            raise RuntimeError(
                f"adapters on experts have dropout, which PEFT's own forward leaves out, and it has to run this call: "
                f"{added.text}. Convert the model as it is now, or take their dropout away"
            )
        return type(self.wrapper).forward(self.wrapper, x, *args, **kwargs)  # type: ignore[no-any-return]

    def _adapters(self, x: Tensor) -> Adapters | Reason:
        module: Any = wrapped(self.wrapper)
        if not is_converted(module):
            return Reason("the experts are not converted")
        return why_original(module, x) or read_adapters(self.wrapper)


def why_original(module: Any, x: Tensor) -> Reason | None:
    """Why a call of a converted module with x, [N, C], runs what it would run unconverted."""
    if experts_implementation(module.config.model) not in COMPUTED_AS_SAID:
        return Reason("its config names another implementation since")
    if _by_mode():
        return Reason("a TorchFunctionMode may replace what it calls")
    if x.is_meta and counting() is None:
        return WITHOUT_DATA
    return unfit(module, x)


def _by_mode() -> bool:
    return not torch.compiler.is_compiling() and under_foreign_mode()


def _is_read() -> bool:
    """Whether a mode of ckptfused's own follows what is called: nothing is trained then."""
    return any(type(mode).__module__.startswith("ckptfused.") for mode in function_modes())


def is_converted(module: nn.Module) -> bool:
    """Whether a module is one of experts that was converted."""
    return isinstance(vars(module).get("config"), ExpertsConfig)


def is_changed(module: nn.Module) -> bool:
    """Whether a conversion may change a module: one of experts, or PEFT's wrapper of one."""
    return is_converted(module) or is_experts(module) or is_wrapper(module)


def convert_experts(named: dict[str, nn.Module]) -> tuple[str, ...]:
    """Has these modules run as one op each, where they are experts and can; what the report says of others."""
    left: dict[str, list[str]] = {}
    configs: dict[Any, ExpertsConfig] = {}
    sharded = any(map(is_fully_sharded, named.values()))
    for name, module in named.items():
        if experts_functions() is None or not is_experts(module):
            continue
        config: Any = module.config
        found = read_experts(module, experts_implementation(config), sharded)
        if isinstance(found, Reason):
            left.setdefault(found.text, []).append(name)
            continue
        _register()
        # Layers that are alike have one config, as before: what is proved of one is known of all.
        module.config = configs.setdefault((id(config), found), ExpertsConfig(config, found))  # type: ignore[assignment]
    notes = tuple(
        f"{_run(names)}: experts run as they did, their router again in backward: {why}" for why, names in left.items()
    )
    return notes + _convert_adapters(named)


def _convert_adapters(named: dict[str, nn.Module]) -> tuple[str, ...]:
    """Has the op add what PEFT's wrappers around converted experts add; what the report says of others."""
    left: dict[str, list[str]] = {}
    wrappers: dict[str, Any] = {name: module for name, module in named.items() if is_wrapper(module)}
    inner = {module.base_layer for module in wrappers.values()}
    for name, module in wrappers.items():
        base: Any = wrapped(module)
        if module in inner:
            continue
        why = unproved(module, base.config.spec) if is_converted(base) else _NO_EXPERTS
        dropped = ", without their dropout" if drops(module, now=False) else ""
        if why is None:
            module.forward = AdaptedForward(module)
        elif dropped or why is not _NO_EXPERTS:
            left.setdefault(f"{dropped}: {why.text}", []).append(name)
    return tuple(f"{_run(names)}: PEFT merges its adapters at each call{why}" for why, names in left.items())


_NO_EXPERTS = Reason("they are on no experts that run as one operation")


def _run(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def revert_experts(module: nn.Module) -> None:
    """Gives a module of experts the config back that it had, and PEFT's wrapper its own forward."""
    if isinstance(vars(module).get("forward"), AdaptedForward):
        del module.forward
    config = vars(module).get("config")
    if isinstance(config, ExpertsConfig):
        module.config = config.model
