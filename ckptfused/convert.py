"""`convert`: one call turns an existing model into a fused-checkpoint model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.models import families as families
from ckptfused.models.describe.layers import describe
from ckptfused.models.family import Family, register
from ckptfused.models.forward import original
from ckptfused.models.install import install, revert
from ckptfused.models.layer_mode import LayerMode
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.ranks import of_first_rank
from ckptfused.models.release import Release, end_releases
from ckptfused.models.report import HeadReport, LayerReport, Report
from ckptfused.planner.plan import Plan, plan
from ckptfused.profiler.step import Batch, MakeOptimizer
from ckptfused.simulate.autocast import Autocast
from ckptfused.spec import Keep

__all__ = [
    "FFN",
    "Attention",
    "CheckpointPolicy",
    "Family",
    "HeadReport",
    "Inputs",
    "LayerMode",
    "LayerReport",
    "Parts",
    "Reason",
    "Report",
    "convert",
    "original",
    "register",
    "revert",
]


def convert(
    model: nn.Module,
    keep: Keep | None = None,
    *,
    policy: CheckpointPolicy | None = None,
    loss: str | None = None,
    scratch: int | str | None = None,
    offload: bool = False,
    process_group: Any = None,
    budget: float | str | None = None,
    batch: Batch | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    device: str | torch.device | None = None,
    shards: int = 1,
    autocast: Autocast = None,
    gradient_accumulation_steps: int = 1,
    release: Optimizer | None = None,
) -> Report:
    """Turns an existing model into a fused-checkpoint model, in place.

    Each layer gets a `forward` of its own, as an attribute of the instance; its class, parameters, submodules,
    hooks and `state_dict` stay as they are. A layer that an adapter reads, or that is derived from its own code and
    proved, runs as one fused op that saves its input; any other is checkpointed with `ckptfused.checkpoint`. What is
    safe is decided at each call: with a key/value cache, or where attention weights are asked for, a layer runs as it
    was. A second `convert` changes what is kept. `revert` undoes it.

    keep: what each layer keeps for backward beside its input: a preset or names (`ckptfused.spec.KEEP_PRESETS`);
    None: "inputs", or what the policy says.
    policy: what differs from layer to layer, in the place of all other options (docs/policies.md).
    loss: "chunked" has Hugging Face's language models make their loss without ever holding the logits
    (`ckptfused.linear_cross_entropy`), in training where labels are given; `outputs.logits` is then None. Evaluation,
    generation, `logits_to_keep` and loss functions of your own run as they did. None: as they were.
    scratch: bytes that the hidden-wide values of a layer's FFN may take at a time in backward, so those of its
    attention (docs/long-sequences.md), and so the logits of a chunked loss; more of them go in tiles, and more of q, k
    and v are made again after the FFN. An int or "64MiB"; None: by device (docs/keep.md).
    offload: the input that each layer saves goes to host memory while the next layers run, and comes back a layer ahead
    of its use (docs/keep.md); the last layer's stays, and so does what is on the CPU.
    budget: bytes, or a text such as "40GiB", which a step is to need no more of: the policy is the fastest that does,
    as `ckptfused.plan` finds it for `batch`, `optimizer`, `device`, `shards`, `autocast`, `gradient_accumulation_steps`
    (docs/budget.md). With `process_group` the first rank finds it for all.
    release: the optimizer that trains the model, which then updates each weight in backward as soon as its gradient is
    complete, so that gradients are never all there (docs/memory.md#updates-in-backward). Call its `step()` after each
    backward, as always. With a budget it stands in the place of `optimizer`.
    process_group: a `torch.distributed` group, or True for the default one; the call is then a collective which
    checks that all ranks convert alike. None: no communication.

    **Saves** in each fused layer x, what `keep` names, 16 bytes of random state where it has dropout.
    **Recomputes** the rest in backward.
    **Raises** `ValueError` for an unknown `keep`, `loss` or `scratch`, for a policy with other options beside it or for
    another number of layers, for tensor-parallel weights and `nn.DataParallel`, and, with `process_group`, where ranks
    differ; `BudgetError`, a `ValueError`, if nothing fits into the budget; `TypeError` if `model` is no module; for
    `release`, what `ckptfused.models.release.Release` raises. The model is then as it was.
    """
    updates = None if release is None else Release(model, release)
    others = {"keep": keep, "loss": loss, "scratch": scratch, "offload": offload or None}
    step: dict[str, Any] = {"batch": batch, "optimizer": optimizer, "device": device, "autocast": autocast}
    counts: dict[str, Any] = {"shards": shards, "gradient_accumulation_steps": gradient_accumulation_steps}
    if budget is not None:
        _check_alone("budget", others | {"policy": policy})
        if batch is None:
            raise ValueError("batch: pass batch= with budget=, whose plan is for a step of that batch")
        if updates is not None:
            _check_alone("release", {"optimizer": optimizer})
            step |= {"optimizer": release, "release": True}
        policy, notes, peak = of_first_rank(process_group, lambda: _said(plan(model, budget=budget, **step, **counts)))
        report = _installed(model, policy, process_group, updates)
        return replace(report, notes=(*notes, *report.notes), peak=peak)
    for name, value in (step | {name: None if count == 1 else count for name, count in counts.items()}).items():
        if value is not None:
            raise ValueError(f"{name}: pass budget= with it, or leave it out: it says of which step a plan is made")
    if policy is None:
        limits = {"scratch": scratch} | ({} if loss is None else {"loss": loss, "loss_scratch": scratch})
        policy = CheckpointPolicy.uniform("inputs" if keep is None else keep, offload=offload, **limits)
    else:
        if not isinstance(policy, CheckpointPolicy):
            raise TypeError(f"policy: expected a CheckpointPolicy, got {policy!r}")
        _check_alone("policy", others)
    return _installed(model, policy, process_group, updates)


def _installed(model: nn.Module, policy: CheckpointPolicy, process_group: Any, updates: Release | None) -> Report:
    installed = install(model, policy, process_group)
    end_releases(model)
    if updates is None:
        return describe(model, installed)
    updates.begin()
    report, name = describe(model, installed), type(updates.optimizer).__name__
    return replace(report, notes=(*report.notes, f"{name} updates {len(updates.weights)} weights in backward"))


def _check_alone(name: str, others: dict[str, Any]) -> None:
    given = [f"{other}={value!r}" for other, value in others.items() if value is not None]
    if given:
        raise ValueError(f"convert: pass either {name}= or {', '.join(given)}, not both: a {name} decides all of this")


def _said(found: Plan) -> tuple[CheckpointPolicy, tuple[str, ...], int]:
    """A plan's policy, what the report says of it, and its peak."""
    line = (
        f"plan {found.policy.digest}: {found.peak:,} of {found.budget:,} bytes at the peak of a step, "
        f"{found.seconds:,.4f} s, predicted for {found.device}"
        + (f" and each of {found.shards} ranks" if found.shards > 1 else "")
    )
    return found.policy, (line, *found.notes), found.peak
