"""Which modules of a model are its layers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from ckptfused.convert.family import Family, family_of
from ckptfused.convert.wrapper import unwrapped
from ckptfused.modules.fused import FusedModule


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """The outermost layers in order, with their adapter: known classes, Hugging Face's checkpointing layers, and
    what repeats in a `ModuleList` or `Sequential`, or stands in a `ModuleList` alone, for a loop to call several times
    (ALBERT). ckptfused's own modules are left as they are.
    """
    yield from _below(model, "", False, set())


def _below(
    module: nn.Module, name: str, repeated: bool, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Family | None]]:
    name, module = unwrapped(module, name)
    if module in seen or isinstance(module, FusedModule):
        return
    seen.add(module)
    family = family_of(module)
    inner = _repeating(module)
    if family is not None or _checkpointing_layer(module) or (repeated and not _holds_layers(module, inner)):
        yield name, module, family
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        new = unwrapped(child)[1] not in seen
        found = list(_below(child, path, child in inner, seen))
        if not found and new and _stands_alone(module):
            found = [(*unwrapped(child, path), None)]
        yield from found


def _repeating(module: nn.Module) -> list[nn.Module]:
    """The children of a container that are large and of a class that repeats; shared weights repeat too."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [(child, unwrapped(child)[1]) for child in module._modules.values() if child is not None]
    classes = Counter(type(inner) for _, inner in children)
    return [child for child, inner in children if classes[type(inner)] > 1 and _is_large(inner)]


def _stands_alone(module: nn.Module) -> bool:
    """Whether a list holds one large module, in which there is nothing of ckptfused's own."""
    if not isinstance(module, nn.ModuleList) or len(module) != 1 or not _is_large(unwrapped(module[0])[1]):
        return False
    return not any(isinstance(inner, FusedModule) for inner in module[0].modules())


def _holds_layers(module: nn.Module, inner: list[nn.Module]) -> bool:
    """Whether a module that repeats is a stage rather than a layer: a `Sequential` of layers, or a module most of
    whose parameters are those of layers with an adapter, or of ckptfused's own.
    """
    if inner and type(module) is nn.Sequential:
        return True
    if any(map(_is_known, _wrapped(module))):
        return True
    known = sum(p.numel() for layer in module.modules() if _is_known(layer) for p in layer.parameters())
    return 2 * known > sum(p.numel() for p in module.parameters())


def _is_known(module: nn.Module) -> bool:
    return family_of(module) is not None or isinstance(module, FusedModule)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """What a wrapper (FSDP1's, which holds the parameters; torch.compile's) is around."""
    children = list(module.children())
    while len(children) == 1:
        yield children[0]
        children = list(children[0].children())


def _checkpointing_layer(module: nn.Module) -> bool:
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _is_large(module: nn.Module) -> bool:
    """Worth a checkpoint: it is called (lists of modules are not), has parts, and parameters. Compiled by
    `torch.jit`, it stays as it is."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
