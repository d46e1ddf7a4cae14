"""What a layer does around its experts, run once: its router is not replayed, so nothing can choose other experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.models.experts.install import is_converted, why_original
from ckptfused.models.experts.read import is_experts
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


def run_once(layer: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function that calls a layer's router and experts, and keeps of it what they save.

    Norms and shared experts beside them are checkpointed each for itself.
    """
    with entered(), _checkpointed(beside_experts(layer)):
        return function(*args, **kwargs)


def beside_experts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules beside experts and their routers: those with several projections, and those without a matrix."""
    for child in module.children():
        if is_experts(child):
            continue
        if any(map(is_experts, child.modules())):
            yield from beside_experts(child)
        elif _projections(child) > 1 or all(p.dim() < 2 for p in child.parameters()):
            yield child


def _projections(module: nn.Module) -> int:
    return sum(isinstance(inner, nn.Linear) for inner in module.modules())


@contextlib.contextmanager
def _checkpointed(modules: Iterator[nn.Module]) -> Iterator[None]:
    """A context in which calls of these modules keep their inputs alone."""
    given = [module for module in modules if "forward" not in vars(module)]
    try:
        for module in given:
            forward = same_sdpa(partial(type(module).forward, module))
            module.forward = partial(checkpoint, forward)  # type: ignore[method-assign]
        yield
    finally:
        for module in given:
            vars(module).pop("forward", None)
