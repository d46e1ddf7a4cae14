"""The budget of a plan, and what is said where none fits into it."""

from __future__ import annotations

from torch import nn

from ckptfused.models.policy import CheckpointPolicy
from ckptfused.planner.step_costs import Costs
from ckptfused.profiler.step import has_vocabulary
from ckptfused.simulate.cards import usable
from ckptfused.simulate.devices import Device
from ckptfused.sizes import size


class BudgetError(ValueError):
    """No plan fits into the budget."""

    def __init__(self, text: str, least: int) -> None:
        super().__init__(text)
        self.least = least
        """Bytes of the smallest plan that was found."""

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:  # to other ranks
        return type(self), (str(self), self.least)


def within(budget: int | None, device: Device) -> tuple[int, tuple[str, ...]]:
    """The budget, and what there is to say of it and the device's memory."""
    has = f"the {size(device.memory)} that one {device.name} has"
    if budget is None:
        if not device.memory:
            raise ValueError(
                f'budget: pass a number of bytes such as "8GiB", for the memory of {device.name} is not known'
            )
        budget = usable(device.memory)
        left = f"{size(device.memory - budget)} for the CUDA context, workspaces of libraries and fragmentation"
        return budget, (f"the budget is {has}, less {left}",)
    return budget, (f"the budget is above {has}",) if 0 < device.memory < budget else ()


def not_enough(
    costs: Costs, budget: int, least: int, policy: CheckpointPolicy, model: nn.Module, kind: str, whole: bool
) -> tuple[str, int]:
    """What to say, and the least budget. Of each remedy the bytes that it would save, where they are known.

    whole: the model is not sharded already.
    """
    language = has_vocabulary(model)
    base = costs.base
    trained = base.all_gradients + base.optimizer
    full = max(2 * base.all_gradients, base.optimizer) > base.weights  # not adapters alone, which LoRA has already
    frozen = trained if full else 0
    divided = sum(p.nbytes for p in model.parameters()) + trained if whole else 0
    steps_own = max(0, least - costs.state - base.all_gradients)
    remedies = [
        (frozen, "LoRA (gradients and optimizer state of all weights; adapters have some of their own)"),
        (divided * 7 // 8, "FSDP2 over 8 ranks, shards=8 (parameters, gradients and optimizer state)"),
        (steps_own // 2, f"half as many {'sequences or tokens' if language else 'samples'} in the batch (activations)"),
    ]
    lines = [
        f"budget: no plan needs as little as {size(budget)}; the least that one was found to need is {size(least)}, "
        f"{least:,} bytes, with {policy}. What else would help:",
        *(f"  - {text}: about {size(saved)} less" for saved, text in remedies if saved > 0),
    ]
    if len(costs.heads) == 1 and language:
        lines.append('  - a loss without logits (loss="chunked"), which this model or batch does not allow as it is')
    if kind == "cpu":
        lines.append("  - on a GPU, inputs of layers in host memory (offload), of which plans make use there")
    return "\n".join(lines), least
