"""Which modules of a model are its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import nn

from ckptfused.compat.transformers import is_checkpointing_layer
from ckptfused.models.family import Family, family_of
from ckptfused.models.wrapper import unwrapped
from ckptfused.modules.fused import FusedModule


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Family | None]]:
    """The outermost layers in order, with their adapter: known classes, Hugging Face's checkpointing layers, and
    what repeats in a `ModuleList`, `ModuleDict` or `Sequential`, or stands in a `ModuleList` alone, for a loop to call
    several times (ALBERT). Of stages that repeat it is what is large in them: blocks, and what stands beside these
    (downsampling). Where a model has none of these, it is what repeats among its own attributes (`self.block1`, …).
    ckptfused's own modules are left as they are.
    """
    found = list(_below(model, "", {}, set()))
    yield from found or _below(model, "", _and_whether_stages(_large_ones(model.children())), set())


def _below(
    module: nn.Module, name: str, repeating: dict[nn.Module, bool], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Family | None]]:
    repeated, stage = module in repeating, repeating.get(module, False)
    name, module = unwrapped(module, name)
    if module in seen or isinstance(module, FusedModule):
        return
    seen.add(module)
    family = family_of(module)
    inner = _and_whether_stages(_repeating(module))
    if _only_holds(module) or not name:  # of lists in a list, and a model's attributes
        inner |= repeating
    checkpoints = is_checkpointing_layer(module)
    stage = stage or (checkpoints and _holds_layers(module))
    if family is not None or ((repeated or checkpoints) and not stage):
        yield name, module, family
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        new = unwrapped(child)[1] not in seen
        found = list(_below(child, path, inner, seen))
        beside = stage and not inner and _is_large(unwrapped(child)[1])
        if not found and new and not _holds_own(child) and (beside or _stands_alone(module)):
            found = [(*unwrapped(child, path), None)]
        yield from found


def _repeating(module: nn.Module) -> list[nn.Module]:
    """What a container has that is large and of a class that repeats, lists in a list included."""
    return _large_ones(_held(module)) if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) else []


def _large_ones(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are large and of a class that repeats among these; shared weights repeat too."""
    children = [(child, unwrapped(child)[1]) for child in modules]
    classes = Counter(type(inner) for _, inner in children)
    return [child for child, inner in children if classes[type(inner)] > 1 and _is_large(inner)]


def _and_whether_stages(modules: list[nn.Module]) -> dict[nn.Module, bool]:
    """Whether each of the modules that repeat is a stage rather than a layer. Where one of a class is, the others are,
    those with a single block too; a `Sequential` is by what it holds.
    """
    holds = {child: _holds_layers(unwrapped(child)[1]) for child in modules}
    stages = {type(unwrapped(child)[1]) for child, is_stage in holds.items() if is_stage} - {nn.Sequential}
    return {child: is_stage or type(unwrapped(child)[1]) in stages for child, is_stage in holds.items()}


def _held(container: nn.Module) -> Iterator[nn.Module]:
    """The children of a container; in the place of lists and dicts in a list, what they hold."""
    for child in container._modules.values():
        if isinstance(container, nn.ModuleList) and _only_holds(child):
            yield from _held(child)
        elif child is not None:
            yield child


def _only_holds(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether it is a list or dict that is not called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _stands_alone(module: nn.Module) -> bool:
    """Whether a list holds one large module."""
    return isinstance(module, nn.ModuleList) and len(module) == 1 and _is_large(unwrapped(module[0])[1])


def _holds_own(module: nn.Module) -> bool:
    """Whether there is something of ckptfused's own in a module."""
    return any(isinstance(inner, FusedModule) for inner in module.modules())


def _holds_layers(module: nn.Module) -> bool:
    """Whether a module that repeats, or checkpoints itself, is a stage rather than a layer: a `Sequential` of layers,
    one that has nothing but blocks (RegNet's), or a module most of whose parameters are those of blocks in a container
    of its own, of layers with an adapter, that checkpoint themselves (Swin's), or of ckptfused's own.
    """
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and _repeating(module):
        return True
    if _has_only_blocks(module) or any(map(_is_known, _wrapped(module))):
        return True
    lists = [child for child in module.children() if not _are_experts(child, module)]
    within = [block for child in lists for block in _repeating(child) if _has_parts(block)]
    within += [layer for layer in module.modules() if layer is not module and _is_known(layer)]
    blocks = {p for layer in within for p in layer.parameters()}
    return 2 * sum(p.numel() for p in blocks) > sum(p.numel() for p in module.parameters())


def _has_only_blocks(module: nn.Module) -> bool:
    """Whether blocks of one class are all that a module has, two of them made alike: the halves of a layer are not."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    kinds = {tuple(map(type, child.modules())) for child in children}
    of_one_class = len(set(map(type, children))) == 1 and next(module.parameters(recurse=False), None) is None
    return of_one_class and len(kinds) < len(children) and all(map(_has_parts, children))


def _are_experts(blocks: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer has a list of blocks, and beside it a matrix with a row for each, by which a router chooses."""
    beside = [*layer.parameters(recurse=False)]
    beside += [p for child in layer.children() if child is not blocks for p in child.parameters(recurse=False)]
    return isinstance(blocks, nn.ModuleList | nn.ModuleDict) and any(
        p.dim() == 2 and len(p) == len(blocks) for p in beside
    )


def _has_parts(block: nn.Module) -> bool:
    """Whether a block has parts of several modules, such as attention, or a norm and more than one product (ConvNeXt).
    The experts of one layer are products alone, a unit of convolution and norm has one product.
    """
    if any(next(child.children(), None) is not None for child in block.children()) or _is_written_out(block):
        return True
    ranks = [max((p.dim() for p in child.parameters()), default=0) for child in block.children()]
    return 1 in ranks and sum(rank > 1 for rank in ranks) > 1


def _is_known(module: nn.Module) -> bool:
    return family_of(module) is not None or isinstance(module, FusedModule) or is_checkpointing_layer(module)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """What a wrapper (FSDP1's, which holds the parameters; torch.compile's) is around."""
    children = list(module.children())
    while len(children) == 1:
        yield children[0]
        children = list(children[0].children())


def _is_large(module: nn.Module) -> bool:
    """Worth a checkpoint: it is called (lists of modules are not), has parts, and parameters. What has modules that
    `torch.jit` compiled stays as it is: no checkpoint can replay them. Their classes have no forward to look at."""
    if _has_scripted(module) or type(module).forward is nn.Module.forward:
        return False
    has_parts = next(module.children(), None) is not None
    return (has_parts and next(module.parameters(), None) is not None) or _is_written_out(module)


def _has_scripted(module: nn.Module) -> bool:
    return any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())


def _is_written_out(module: nn.Module) -> bool:
    """Whether a block has its weights as parameters of its own: more than one matrix, which a projection has."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module)
    if any(kind.__module__.partition(".")[0] == "torch" for kind in kinds):
        return False
    return sum(p.dim() > 1 for p in module.parameters(recurse=False)) > 1
