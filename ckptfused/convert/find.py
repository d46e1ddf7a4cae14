"""Which modules of a model are its layers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from torch import nn

from ckptfused.convert.family import Family, family_of
from ckptfused.convert.wrapper import unwrapped
from ckptfused.modules.fused import FusedModule


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """The outermost layers in order, with their adapter: known classes, Hugging Face's checkpointing layers, and
    what repeats in a `ModuleList` or `Sequential`. ckptfused's own modules are left as they are.
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
        yield from _below(child, f"{name}.{child_name}" if name else child_name, child in inner, seen)


def _repeating(module: nn.Module) -> list[nn.Module]:
    """The children of a container that are large and of a class that repeats; shared weights repeat too."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [(child, unwrapped(child)[1]) for child in module._modules.values() if child is not None]
    classes = Counter(type(inner) for _, inner in children)
    return [child for child, inner in children if classes[type(inner)] > 1 and _is_large(inner)]


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
    """Worth a checkpoint: it is called (lists of modules are not), has parts, and parameters."""
    if type(module).forward is nn.Module.forward:
        return False
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
