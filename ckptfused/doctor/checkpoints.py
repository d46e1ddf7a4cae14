"""Checks by looking: checkpoints that give wrong gradients or statistics, or replay more than once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from ckptfused.compat.torch_compile import partitioner_budget
from ckptfused.compat.torch_distributed import WRAPPED
from ckptfused.compat.torch_modules import BatchNorm, DropoutBase, forward_hooks, forward_pre_hooks, is_compiled
from ckptfused.doctor.findings import Finding, joined
from ckptfused.doctor.look import HUGGING_FACE, OURS, WRAPPER, Checkpoint, Look
from ckptfused.models.forward import ConvertedForward
from ckptfused.modules.fused import FusedModule
from ckptfused.state.fingerprints import leaves

_RATE = re.compile(r"drop(out|_path|_prob|_rate|_p)?|p_drop")


def _others(look: Look) -> list[Checkpoint]:
    """Checkpoints at work that are not ckptfused's; of one within another, the outer one too."""
    return [c for c in look.checkpoints if c.by != OURS and c.active and not _ours(c.module)]


def _ours(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), ConvertedForward) or isinstance(module, FusedModule)


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it that run as they were written, not as part of a layer of ckptfused's."""
    if _ours(module):
        return
    yield module
    for child in module.children():
        yield from _inside(child)


def reentrant_with_frozen_inputs(look: Look) -> Iterator[Finding]:
    """No gradient reaches what is inside: a reentrant checkpoint only passes on what its inputs require."""
    order = list(look.model.modules())
    for c in look.checkpoints:
        if not (c.reentrant and c.active and any(p.requires_grad for p in c.module.parameters())):
            continue
        own = {id(module) for module in c.module.modules()}
        before = []
        for module in order:
            if id(module) in own:
                break
            before.append(module)
        trained = any(p.requires_grad for module in before for p in module.parameters(recurse=False))
        hooks = any(forward_hooks(module) or forward_pre_hooks(module) for module in (*before, c.module))
        batch_learns = any(getattr(t, "requires_grad", False) for t in _batch_tensors(look))
        if not (trained or hooks or batch_learns):
            yield Finding(
                "error",
                look.name(c.module),
                f"a reentrant checkpoint ({c.by}) whose inputs are frozen: no gradient reaches its parameters",
                "use_reentrant=False, or model.enable_input_require_grads()",
            )
            return  # those behind it get inputs that require a gradient only by a trained layer before


def _batch_tensors(look: Look) -> list[Any]:
    return leaves(look.step.batch)


def random_states_left_out(look: Look) -> Iterator[Finding]:
    """`preserve_rng_state=False` around dropout: the replay has other masks than the forward."""
    places: list[str] = []
    for c in _others(look):
        if not c.preserves:
            places += [look.name(module) for module in _inside(c.module) if _rng_states(module)]
    if places:
        yield Finding(
            "error",
            joined(places),
            "dropout under a checkpoint with preserve_rng_state=False: the replay draws other masks, so gradients are "
            "those of another network than the loss (accelerate's FSDP2 path sets it so)",
            "checkpoint_wrapper(…, preserve_rng_state=True), ckptfused.convert, or dropout 0",
        )


def _rng_states(module: nn.Module) -> bool:
    """Whether a module draws random numbers in its present mode, as far as its attributes say."""
    if not module.training:
        return False
    if isinstance(module, DropoutBase):
        return module.p > 0
    rates = [value for name, value in vars(module).items() if _RATE.search(name) and isinstance(value, float)]
    return any(rate > 0 for rate in rates)


def writes_in_place(look: Look) -> Iterator[Finding]:
    """Modules that change their input where another library's checkpoint replays from it."""
    first: dict[str, None] = {}
    for c in _others(look):
        leaf = next((m for m in _inside(c.module) if next(m.children(), None) is None), None)
        if leaf is not None and getattr(leaf, "inplace", False) is True:
            first[look.name(leaf)] = None
    if first:
        yield Finding(
            "warning",
            joined(first),
            "an in-place module is the first in a checkpoint: it changes the very input that the replay starts from",
            "inplace=False, or ckptfused.checkpoint, which runs it on a copy",
        )


def statistics_twice(look: Look) -> Iterator[Finding]:
    """Batch norms whose statistics each replay moves once more."""
    places = [
        look.name(m)
        for c in _others(look)
        for m in _inside(c.module)
        if isinstance(m, BatchNorm) and m.training and m.track_running_stats
    ]
    if places:
        yield Finding(
            "warning",
            joined(places),
            "BatchNorm under a checkpoint: its running statistics are updated twice, in forward and in the replay",
            "use ckptfused.checkpoint or ckptfused.convert, which update them once",
        )


def replayed_twice(look: Look) -> Iterator[Finding]:
    """A checkpoint within another: its layers are replayed once for each."""
    nested: dict[str, str] = {}
    for outer in look.checkpoints:
        if not outer.active:
            continue
        inside = {id(module) for module in outer.module.modules()}
        for inner in look.checkpoints:
            if inner is outer or not inner.active or id(inner.module) not in inside:
                continue
            if inner.module is outer.module and not _later(inner, outer):
                continue
            ours = outer.by == OURS and inner.by == OURS  # these see one another
            if not ours and not _has_nothing_to_replay(outer, inner):
                nested[look.name(inner.module)] = f"{inner.by} within {outer.by}"
    kinds: dict[str, list[str]] = defaultdict(list)
    for place, text in nested.items():
        kinds[text].append(place)
    for text, places in kinds.items():
        yield Finding(
            "warning",
            joined(places),
            f"checkpointed twice ({text}): its forward runs up to three times a step, for the memory of once",
            "keep one of the two; ckptfused.convert needs no other (model.gradient_checkpointing_disable())",
        )


def _later(inner: Checkpoint, outer: Checkpoint) -> bool:
    """Whether `outer` is the outer one of two checkpoints of one module: Hugging Face's is around ckptfused's."""
    return outer.by == HUGGING_FACE and inner.by == OURS


def _has_nothing_to_replay(outer: Checkpoint, inner: Checkpoint) -> bool:
    """Whether a checkpoint around a layer of ckptfused's knows that it need not replay it."""
    if inner.by != OURS or outer.reentrant:
        return False
    if outer.by == HUGGING_FACE:  # a converted layer comes before it
        return outer.module is inner.module
    alone = outer.by == WRAPPER and getattr(outer.module, WRAPPED, None) is inner.module
    forward = vars(inner.module).get("forward")
    policy = forward.mode if isinstance(forward, ConvertedForward) else getattr(inner.module, "_mode", None)
    return alone and bool(getattr(policy, "inputs_alone", True))


def undone_by_the_compiler(look: Look) -> Iterator[Finding]:
    """Compiled regions whose partitioner decides anew what is kept."""
    compiled = [module for module in look.model.modules() if is_compiled(module)]
    if not compiled:
        return
    budget = partitioner_budget()
    if budget < 1 and look.checkpoints:
        yield Finding(
            "warning",
            joined(map(look.name, compiled)),
            f"compiled with activation_memory_budget={budget}: its partitioner may replay what a checkpoint, or a "
            "fused layer, replays already",
            "torch._functorch.config.activation_memory_budget = 1, and let the checkpoint decide",
        )
    others = {c.module for c in look.checkpoints if c.by != OURS}
    foreign = [m for m in compiled if any(inner in others for inner in m.modules() if inner is not m)]
    if foreign:
        yield Finding(
            "advice",
            joined(map(look.name, foreign)),
            "compiled around checkpoints: the partitioner may keep what they would replay",
            "compile each layer, and put the checkpoint around it: checkpoint_wrapper(torch.compile(layer))",
        )
