"""Checks by looking: layers that are left out, and ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ckptfused.doctor.findings import Finding, joined
from ckptfused.doctor.look import Look
from ckptfused.doctor.ranks import everyones
from ckptfused.models.forward import ConvertedForward
from ckptfused.modules.fused import FusedModule
from ckptfused.sizes import counted


def uncovered_layers(look: Look) -> Iterator[Finding]:
    """Layers that nobody checkpoints, though others are."""
    covered = {id(m) for c in look.checkpoints for m in (*c.module.modules(),)}
    inner = {id(c.module) for c in look.checkpoints}
    left = [m for m in look.layers if id(m) not in covered and not any(id(part) in inner for part in m.modules())]
    some = len(left) < len(look.layers) or any(isinstance(m, FusedModule) for m in look.model.modules())
    if left and some and look.checkpoints and any(p.requires_grad for m in left for p in m.parameters()):
        yield Finding(
            "advice",
            joined(map(look.name, left)),
            f"{counted(len(left), 'layer')} without a checkpoint, while others have one: all is saved there",
            "as you wish, where memory allows it; else wrap them, too, or ckptfused.convert(model)",
        )


def ranks_differ(look: Look) -> Iterator[Finding]:
    """A collective where processes are joined: each says how its layers are checkpointed."""
    everyone = everyones(_described(look))
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            first, other = everyone[0].get(name, "not checkpointed"), theirs.get(name, "not checkpointed")
            if first != other:
                yield Finding(
                    "error",
                    name,
                    f"ranks differ: rank 0 has {first}, rank {rank} has {other}; collectives inside replays can hang",
                    "build the policy from the same numbers on each rank: ckptfused.convert(model, process_group=True)",
                )
                return


def _described(look: Look) -> dict[str, str]:
    """How each module is checkpointed, the same text on every rank."""
    found: dict[str, str] = {}
    for c in look.checkpoints:
        text = f"{c.by}{', reentrant' * c.reentrant}{', without random states' * (not c.preserves)}{_policy(c.module)}"
        name = look.name(c.module)
        found[name] = f"{found[name]}; {text}" if name in found else text
    return found


def _policy(module: nn.Module) -> str:
    forward = vars(module).get("forward")
    policy = forward.mode if isinstance(forward, ConvertedForward) else getattr(module, "_mode", None)
    return "" if policy is None else f", {policy}"
