"""The policy with which a model's step fits into a budget of memory and is fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isqrt
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfused.models.describe.layers import describe
from ckptfused.models.install import install
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.models.report import Report
from ckptfused.planner import frontier
from ckptfused.planner.budget_error import BudgetError, not_enough, within
from ckptfused.planner.counted_plans import Counted
from ckptfused.planner.plan_view import plan_json, plan_picture, plan_table
from ckptfused.planner.predicted_steps import PredictedSteps
from ckptfused.planner.segments import Divided, OnHost
from ckptfused.planner.sharding import sharded
from ckptfused.planner.step_costs import Costs, costs
from ckptfused.profiler.predict import simulated
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, MakeOptimizer, TrainingStep, check_model
from ckptfused.simulate.autocast import Autocast, autocast_type
from ckptfused.simulate.devices import NAMES, device_named
from ckptfused.sizes import counted, parse_bytes, size
from ckptfused.spec.checks import check_integer

NEVER = 1 << 62
"""Bytes that are in no budget."""
MOST_STEPS = 12
"""The most steps that are predicted to find the plan among those that were counted."""


class Point(NamedTuple):
    """A policy in the plane of memory and time."""

    name: str
    peak: int
    """Bytes."""
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A policy, and what a step needs with it."""

    policy: CheckpointPolicy
    budget: int
    peak: int
    """Bytes of the whole step, predicted: never more than `budget`."""
    seconds: float
    """Predicted seconds of the whole step."""
    profile: Profile
    """The prediction. Of shards, that of the whole model on one device."""
    front: tuple[Point, ...]
    """The plans that none beats in both, by memory, as they were counted layer by layer: the whole step of one,
    predicted, needs no more, but where a layer is called several times, or where autocast casts weights for layers that
    are not fused."""
    standard: tuple[Point, ...]
    """Policies that are made by hand, with the loss of this plan."""
    device: str
    shards: int = 1
    notes: tuple[str, ...] = ()

    def apply(self, model: nn.Module) -> Report:
        """`convert(model, policy=plan.policy)`."""
        return describe(model, install(model, self.policy))

    def summary(self) -> str:
        """A table for a person."""
        return plan_table(self)

    __str__ = summary

    def plot(self, path: str) -> None:
        """Draws memory against time: the front, the plan in it, the budget, and the policies that are made by hand.

        **Raises** `ImportError` without matplotlib.
        """
        plan_picture(self, path)

    def to_json(self) -> str:
        """All of it but the profile, in bytes and seconds."""
        return plan_json(self)


def plan(
    model: nn.Module,
    batch: Batch,
    budget: float | str | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    device: str | torch.device | None = None,
    shards: int = 1,
    autocast: Autocast = None,
    gradient_accumulation_steps: int = 1,
    *,
    release: bool = False,
    host_memory: float | str | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The fastest policy with which a training step of a model needs no more memory than `budget`.

    Steps are predicted on the meta device (`profile`), in which each layer of a kind has each of its modes once: what
    it keeps, the scratch of its FFN, its input offloaded, itself as it was; and the loss in each of its. The best of
    all combinations is found exactly (`planner.frontier`), and its whole step predicted: where that is not what was
    counted, others are. If none fits, layers are joined to segments.

    model: on any device, meta too; as it is if it trains, else as if it did. It is left as it was; what an earlier
    `convert` did to it does not count. batch, optimizer, device, autocast, gradient_accumulation_steps: as in
    `profile`. device: None: the model's own.
    budget: bytes, or a text such as "40GiB": less than the card has, by the CUDA context and fragmentation. None: a
    card's memory less a twentieth, at least 1 GiB, for these (`ckptfused.simulate.cards.usable`).
    shards: over how many ranks FSDP2 shards the model: `fully_shard` of each layer and of the rest. Parameters,
    gradients and optimizer state are divided; counted are a layer's whole parameters while it runs and the next one's
    on their way, its whole gradients and the previous one's, and those of the rest of the model from begin to end.
    release: whether the optimizer updates each weight in backward, as in `profile`; not with shards.
    host_memory: bytes, or a text such as "64GiB", that inputs of layers may take on the host of a GPU; None: any.
    said: is told of each policy that is tried.

    The same on every rank where the device is named; on the "cpu" time depends on rates that are measured.
    **Raises** `BudgetError`, a `ValueError`, if nothing fits; what `profile` raises.
    """
    check_model(model)
    limit = None if budget is None else parse_bytes("budget", budget)
    host = inf if host_memory is None else parse_bytes("host_memory", host_memory)
    check_integer("shards", shards, 1)
    check_integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    target = device_named(_device_of(model) if device is None else device)
    lower = autocast_type(autocast, target.kind)
    step = TrainingStep(batch, optimizer, target, lower, gradient_accumulation_steps, shards, release)
    limit, notes = within(limit, target)
    with simulated(model, step) as (meta_copy, on_meta):
        if not meta_copy.training:
            meta_copy.train()
        steps = PredictedSteps(meta_copy, on_meta, said)
        found = _Planner(steps, whole := costs(steps, host), sharded(whole, meta_copy, shards)).within(limit)
        notes += () if optimizer is not None else (_no_optimizer(meta_copy, shards),)
    return replace(found, notes=(*found.notes, *notes))


def _no_optimizer(model: nn.Module, shards: int) -> str:
    state = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad) // shards
    return f"no optimizer was given: none of its state counts (AdamW's has {size(state)})"


def _device_of(model: nn.Module) -> str:
    """The name of the device that a model is on."""
    kinds = {p.device.type for p in model.parameters()}
    if kinds <= {"cpu"}:
        return "cpu"
    if kinds == {"cuda"}:
        return str(next(model.parameters()).device)
    raise ValueError(f"device: expected one of {', '.join(NAMES)}, got None for a model on {', '.join(sorted(kinds))}")


class _Planner:
    """Finds the plan among those that were counted.

    whole: on one device; own: on each of the shards.
    """

    def __init__(self, steps: PredictedSteps, whole: Costs, own: Costs) -> None:
        self._steps, self._shards = steps, steps.step.shards
        self._whole, self._costs = whole, own
        self._fronts = [(costs, frontier.Front(costs.units)) for costs in own.apart()]
        self._known: dict[CheckpointPolicy, int] = {}
        self._tried: dict[CheckpointPolicy, tuple[Counted, int]] = {}

    def within(self, budget: int) -> Plan:
        """**Raises** `BudgetError`."""
        counted, found = self._place(budget) or self._leanest(budget)
        policy = counted.policy(found)
        profile = self._steps.of(policy)
        head: dict[str, Any] = {"loss": policy.loss, "loss_scratch": policy.loss_scratch}
        return Plan(
            policy=policy,
            budget=budget,
            peak=self._peak(policy),
            seconds=counted.seconds[found],
            profile=replace(profile, optimizer=self._whole.base.optimizer, peak=self._one_device(profile)),
            front=self._shown(counted),
            standard=self._standard(head),
            device=self._steps.device.name,
            shards=self._shards,
            notes=self._whole.base.notes,
        )

    def _place(self, budget: int) -> tuple[Counted, int] | None:
        """The plans among which one fits, and which: of layers alone, else of segments."""
        several = len(self._costs.layers) > 1
        for plans in (self._counted, self._divided) if several else (self._counted,):
            counted = plans()
            found = self._search(counted, budget) if counted.peaks else None
            if found is not None:
                return counted, found
        return None

    def _leanest(self, budget: int) -> tuple[Counted, int]:
        """What needs least, by lower and lower budgets, whatever the first one was. **Raises** `BudgetError`."""
        self._tried.clear()
        self._place(0)
        while self._place(min(map(self._peak, self._tried)) - 1) is not None:
            pass
        policy = min(self._tried, key=lambda policy: (self._known[policy], policy.digest))
        if (least := self._known[policy]) > budget:
            model, kind, whole = self._steps.meta_copy, self._steps.device.kind, self._shards == 1
            raise BudgetError(*not_enough(self._costs, budget, least, policy, model, kind, whole))
        return self._tried[policy]

    def _counted(self) -> Counted:
        def policy(costs: Costs, front: frontier.Front, place: int) -> CheckpointPolicy:
            return costs.policy(front[place].parts)  # type: ignore[arg-type]

        return Counted(
            ([*map(costs.peak, front.peaks)], [*map(costs.seconds, front.seconds)], partial(policy, costs, front))
            for costs, front in self._fronts
        )

    def _divided(self) -> Counted:
        # With more memory than the least that layers alone need, they need not be joined.
        fronts = [Divided(costs, front.peaks[0]) for costs, front in self._fronts]
        apart: list[Divided | OnHost] = [*fronts, *([OnHost(self._steps, self._whole)] if self._shards == 1 else [])]
        return Counted((divided.peaks, divided.seconds, divided.policy) for divided in apart)

    def _search(self, counted: Counted, budget: int) -> int | None:
        """The last of them that fits: what was counted says where to look, predictions of whole steps say whether."""
        fits, exceeds, beyond = -1, len(counted.peaks), 0
        for _ in range(MOST_STEPS):
            guess = sum(1 for peak in counted.peaks if peak + beyond <= budget) - 1
            if guess <= fits and fits >= 0:
                break
            guess = min(max(guess, fits + 1), exceeds - 1)
            if guess <= fits:
                break
            needed = self._peak(policy := counted.policy(guess))
            self._tried[policy] = counted, guess
            beyond = needed - counted.peaks[guess]
            fits, exceeds = (guess, exceeds) if needed <= budget else (fits, guess)
        return fits if fits >= 0 else None

    def _peak(self, policy: CheckpointPolicy) -> int:
        """Predicted peak bytes of a whole step; with shards, what was counted and what a step on one device was seen to
        need beyond its count."""
        if policy not in self._known:
            needed = self._one_device(self._steps.of(policy))
            chosen = None if self._shards == 1 else self._whole.indices(policy)
            if chosen is not None:
                one, each = (c.peak(frontier.peak_of(c.units, chosen), chosen[-1]) for c in (self._whole, self._costs))
                needed = each + max(0, needed - one)
            self._known[policy] = NEVER if policy in self._steps.broken else needed
        return self._known[policy]

    def _one_device(self, profile: Profile) -> int:
        return max(profile.peak - profile.optimizer + self._whole.base.optimizer, self._whole.least)

    def _shown(self, counted: Counted) -> tuple[Point, ...]:
        """The front, by what was counted layer by layer."""
        layers, front = self._counted(), [Point("", NEVER, float("inf"))]
        rows = [*zip(counted.peaks, counted.seconds, strict=True), *zip(layers.peaks, layers.seconds, strict=True)]
        for peak, seconds in sorted(set(rows)):
            if seconds < front[-1].seconds:
                front.append(Point("", peak, seconds))
        return tuple(front[1:])

    def _standard(self, head: dict[str, Any]) -> tuple[Point, ...]:
        """What others choose by hand, as it was counted, or predicted where it was."""
        count = sum(layer.modes != (None,) for layer in self._costs.layers)
        make = CheckpointPolicy
        named = {
            "none": make.none(**head),
            "per layer": make.uniform(**head),
            "every 2": make.every(2, **head),
            "every 4": make.every(4, **head),
            "selective ffn": make.selective("ffn", **head),
            "selective attention": make.selective("attention", **head),
            counted(isqrt(count), "segment"): make.segments(max(1, isqrt(count)), **head),
            "whole model": make.whole_model(**head),
        }
        found = []
        for name, policy in named.items() if count else ():
            if (point := self._point(policy)) is not None:
                found.append(Point(name, self._known.get(policy, point[0]), point[1]))
        return tuple(found)

    def _point(self, policy: CheckpointPolicy) -> tuple[int, float] | None:
        costs = self._costs
        if policy.is_divided:
            return Divided.of(costs, policy)
        chosen = costs.indices(policy)
        if chosen is None:
            return None
        peak, seconds = frontier.peak_of(costs.units, chosen), frontier.seconds_of(costs.units, chosen)
        return costs.peak(peak, chosen[-1]), costs.seconds(seconds)
