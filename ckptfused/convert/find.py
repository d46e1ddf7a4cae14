"""Which modules of a model are its layers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from torch import nn

from ckptfused.convert.family import Family, family_of
from ckptfused.modules.fused import FusedModule


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """The outermost layers in order, with their adapter: known classes, Hugging Face's checkpointing layers, and
    what repeats in a `ModuleList` or `Sequential`. ckptfused's own modules are left as they are.
    """
    yield from _below(model, "", False, set())


def _below(
    module: nn.Module, name: str, repeated: bool, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Family | None]]:
    if module in seen or isinstance(module, FusedModule):
        return
    seen.add(module)
    family = family_of(module)
    if family is not None or repeated or _checkpointing_layer(module):
        yield name, module, family
        return
    # A layer that is there twice (shared weights) repeats too.
    classes = Counter(type(child) for child in module._modules.values())
    container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child_name, child in module.named_children():
        again = container and classes[type(child)] > 1 and _is_large(child)
        yield from _below(child, f"{name}.{child_name}" if name else child_name, again, seen)


def _checkpointing_layer(module: nn.Module) -> bool:
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _is_large(module: nn.Module) -> bool:
    """Worth a checkpoint: it is called (lists of modules are not), has parts, and parameters."""
    if type(module).forward is nn.Module.forward:
        return False
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
