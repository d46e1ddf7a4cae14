"""Weights in shards: FSDP's are whole when a layer runs, tensor-parallel ones are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ckptfused.checks import is_dtensor
from ckptfused.compat.torch_distributed import fsdp1, fsdp2


def refuse_tensor_parallel(
    layer: nn.Module,
    name: str = "",
    inside_fsdp: bool = False,
    apart: Callable[[nn.Module], bool] = lambda module: False,
) -> None:
    """**Raises** `ValueError` where a weight of a layer stays in shards while the layer runs.

    inside_fsdp: an FSDP module around the layer may hold its weights in shards until then. apart: of modules within
    that run as they are, whatever holds their weights.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None:  # slow to import, and nobody has made a DTensor yet
        return
    fused = [(place, module) for place, module in layer.named_modules() if not apart(module)]
    for key, weight in (found for place, module in fused for found in module.named_parameters(place, recurse=False)):
        if isinstance(weight, tensor.DTensor):
            shards = sum(not placement.is_replicate() for placement in weight.placements)
            if shards > int(inside_fsdp or _gathered(layer, key)):
                raise ValueError(
                    f"{name or type(layer).__name__}.{key}: expected a weight that is whole or sharded by FSDP, got a "
                    f"DTensor with placements {weight.placements}. ckptfused runs no tensor-parallel layers: use plain "
                    "PyTorch ones under torch.utils.checkpoint (ckptfused.revert undoes convert), or FSDP instead"
                )


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of a module when it runs."""
    sharded = fsdp2()
    return sharded is not None and isinstance(module, sharded)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A context in which FSDP2 has gathered the weights of a module whose hooks do not run."""
    there = not is_fully_sharded(module) or not any(map(is_dtensor, module.parameters()))
    if there:
        yield
        return
    sharded: Any = module
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()


def _gathered(layer: nn.Module, key: str) -> bool:
    """Whether FSDP gathers this weight only within the layer; that of the layer itself has done so at a call."""
    names = key.split(".")
    return any(is_fully_sharded(layer.get_submodule(".".join(names[:i]))) for i in range(1, len(names)))


def holds_fsdp1(layer: nn.Module) -> bool:
    """Whether FSDP1 wraps a module within a layer."""
    wrapper = fsdp1()
    return wrapper is not None and any(isinstance(module, wrapper) for module in layer.modules())


def is_flattened(layer: nn.Module) -> bool:
    """Whether FSDP1 holds the weights of a layer in flat shards now."""
    linears = (module for module in layer.modules() if isinstance(module, nn.Linear))
    # Not by its name: a parametrized weight would be made, which may move buffers (spectral_norm's).
    weights = (module._parameters.get("weight", vars(module).get("weight")) for module in linears)
    return any(weight is not None and weight.dim() != 2 for weight in weights)
