"""What a layer does around its experts, run once: its router is not replayed, so nothing can choose other experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_modules import is_compiled
from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.layer.shards import holds_fsdp1, is_fully_sharded
from ckptfused.models.experts.adapters import wrapped
from ckptfused.models.experts.install import is_converted, why_original
from ckptfused.models.experts.read import is_experts
from ckptfused.models.experts.shared import forward_beside
from ckptfused.offload import follow
from ckptfused.ops.call import Call
from ckptfused.ops.enclosing_checkpoint import captured, within_a_checkpoint
from ckptfused.recompute.copy_on_write import is_plain_view
from ckptfused.recompute.made_again import MadeAgain
from ckptfused.recompute.per_thread_tensors import entered
from ckptfused.spec import MOST_TEXTS, parse

_proved: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()
"""By layer, the kinds of calls that were seen to make the same again."""


def routes_once(layer: nn.Module, x: Any) -> bool:
    """Whether what a layer makes of x need not be replayed as a whole, since its experts save their inputs alone."""
    found = [module for module in layer.modules() if is_experts(module)]
    if not found or torch.compiler.is_compiling() or not torch.is_grad_enabled() or under_foreign_mode():
        return False
    if not isinstance(x, Tensor) or x.dim() < 2:
        return False
    rows = x.detach().flatten(0, -2)
    return all(is_converted(module) and why_original(module, rows) is None for module in found)


def run_once(layer: nn.Module, x: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of x that calls a layer's router and experts, and keeps of it what they save.

    What is beside them and has several projections is checkpointed, each module for itself. All else is made again as
    in `run_from_input`, where the layer `saves_input_alone`; elsewhere norms are checkpointed, too, but not within a
    checkpoint, which keeps nothing of them: there gradients are summed in the order of `run_from_input`.
    """
    again = MadeAgain() if saves_input_alone(layer, x) else None
    beside = beside_experts(layer)
    if again is not None or within_a_checkpoint():
        beside = filter(_projections_follow, beside)
    with entered(), _checkpointed(beside):
        if again is None:
            return function(*args, **kwargs)
        with again.at_work():
            made = function(*args, **kwargs)
        again.settle(_proved.setdefault(layer, set()))
        again.end()
    return made


def run_from_input(
    layer: nn.Module, call: Call, inputs_alone: bool, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A fused attention half, and a function of its result that calls a layer's router and experts: `run_once`, of
    which no more is kept than the input and what the router chose.

    Norms and the router are made again in backward, operation by operation. So are, with `inputs_alone`, the half's
    result and what its own backward needs; without, something is kept of the half, and its result is, too.
    """
    again = MadeAgain()
    with entered():
        if not inputs_alone:
            y = call.run()
            follow(y)
        else:
            with again.at_work():
                y = call._replace(text=_keeping_all(call.text)).run()
            again.settle()
        with again.at_work(), _checkpointed(filter(_projections_follow, beside_experts(layer))):
            made = function(y, *args, **kwargs)
        again.settle(_proved.setdefault(layer, set()))
        again.end()
    return made


def saves_input_alone(layer: nn.Module, x: Tensor) -> bool:
    """Whether `run_from_input` may run a layer: not within a checkpoint, which keeps nothing but replays all, nor where
    operations run that the dispatcher does not see, nor where a weight is there only while its own module runs.
    """
    if not routes_once(layer, x) or within_a_checkpoint() or captured(x) or not is_plain_view(x):
        return False
    inside = [module for module in layer.modules() if module is not layer]
    return not (holds_fsdp1(layer) or any(map(is_compiled, layer.modules())) or any(map(is_fully_sharded, inside)))


@lru_cache(maxsize=MOST_TEXTS)
def _keeping_all(text: str) -> str:
    return parse(text).with_keep("all").to_string()


def beside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules beside experts and their routers: those with several projections, and those without a matrix."""
    for child in module.children():
        if is_experts(wrapped(child)):
            continue
        if any(map(is_experts, child.modules())):
            yield from beside_experts(child)
        elif _projections_follow(child) or all(p.dim() < 2 for p in child.parameters()):
            yield child


def _projections_follow(module: nn.Module) -> bool:
    """Whether a module has several projections, between which it keeps more than its input."""
    return sum(isinstance(inner, nn.Linear) for inner in module.modules()) > 1


@contextmanager
def _checkpointed(modules: Iterator[nn.Module]) -> Iterator[None]:
    """A context in which calls of these modules keep their inputs alone."""
    own = [module for module in modules if "forward" not in vars(module)]
    try:
        for module in own:
            module.forward = forward_beside(module)  # type: ignore[method-assign]
        yield
    finally:
        for module in own:
            vars(module).pop("forward", None)
