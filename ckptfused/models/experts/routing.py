"""What a layer does around its experts, run once: its router is not replayed, so nothing can choose other experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.models.experts.adapters import wrapped
from ckptfused.models.experts.install import is_converted, why_original
from ckptfused.models.experts.read import has_experts, is_experts
from ckptfused.models.experts.shared import forward_beside
from ckptfused.models.from_input import may_keep_input_alone, run_from_input
from ckptfused.ops.enclosing_checkpoint import within_a_checkpoint
from ckptfused.recompute.made_again import is_recorded
from ckptfused.recompute.per_thread_tensors import entered


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

    What is beside them and has several projections is checkpointed, each module for itself. All else is made again
    where a layer `saves_input_alone`. Elsewhere norms are checkpointed, too, but not within a checkpoint, which keeps
    nothing of them: there gradients are summed in the order of `run_from_input`.
    """
    if not is_recorded() and saves_input_alone(layer, x):
        return run_from_input(layer, x, [lambda x: (run_once(layer, x, function, *args, **kwargs),)])[0]
    beside = beside_experts(layer)
    if is_recorded() or within_a_checkpoint():
        beside = filter(_projections_follow, beside)
    with entered(), _checkpointed(beside):
        return function(*args, **kwargs)


def saves_input_alone(layer: nn.Module, x: Tensor) -> bool:
    """Whether all that a layer keeps beside its input is what its experts keep, and results of checkpoints within."""
    return routes_once(layer, x) and may_keep_input_alone(layer, x)


def beside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules beside experts and their routers: those with several projections, and those without a matrix."""
    for child in module.children():
        if is_experts(wrapped(child)):
            continue
        if has_experts(child):
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
