"""What the block's times are measured against: limits of ratios, and the ideal ones for the GPU at hand.

python -m benchmarks.gpu.goals
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.baselines import HuggingFaceBlock
from benchmarks.cases import LLAMA_3_8B, Case
from benchmarks.gpu.timing import Goal, Times
from benchmarks.meta_seconds import step_seconds
from benchmarks.tables import table
from ckptfused import FusedCheckpointBlock, cost
from ckptfused.cli.models import PlainBlock
from ckptfused.simulate.devices import DEVICES, Device
from ckptfused.spec import KEEP_PRESETS, param_shapes

# Time of the first over that of the second: the limit, and whether it is to be reached from above.
GOALS = (
    ("ckptfused inputs", "ckptfused all", 1.28, False),
    ("ckptfused attention+mid", "ckptfused all", 1.20, False),
    ("eager checkpoint", "ckptfused inputs", 1.10, True),
    ("eager", "ckptfused attention+mid+qkv", 1.00, True),
    ("ckptfused all", "eager", 0.90, False),
)
FLOOR = 0.97
"""The least share of an ideal ratio: below it either work was skipped or what it is compared with is slow."""


@dataclass(frozen=True)
class Ideals:
    """Milliseconds of a step of each variant on a device whose rates are known, as `ckptfused.cost` has them."""

    device: str
    milliseconds: Mapping[str, float]


def device_at_hand(device: str) -> Device | None:
    """The one whose rates are known; of a rehearsal, an H200; None where there are none."""
    if device != "cuda":
        return DEVICES["h200"]
    words = torch.cuda.get_device_name().lower()
    return next((found for name, found in DEVICES.items() if name.split("-")[0] in words.replace(" ", "")), None)


def ideals(case: Case, device: Device | None) -> Ideals:
    """Predicted by running each variant's step on meta tensors."""
    if device is None:
        return Ideals("not known", {})
    steps = {f"ckptfused {keep}": _block(case, keep, device) for keep in KEEP_PRESETS}
    return Ideals(device.name, {name: 1e3 * seconds for name, seconds in (steps | _eager(case, device)).items()})


def _block(case: Case, keep: str, device: Device) -> float:
    s = case.shape
    size: dict[str, Any] = {"dim_feedforward": s.dim_feedforward, "num_kv_heads": s.kv_heads, "keep": keep}
    block = FusedCheckpointBlock.llama(s.d_model, s.nhead, **size, device="meta", dtype=torch.bfloat16)
    spec = block.spec(torch.bfloat16)
    params = {name: torch.bfloat16 for name in param_shapes(spec, s.d_model) if not name.endswith("_b")}
    both = cost.block_seconds(spec, case.batch, case.tokens, s.d_model, torch.bfloat16, device, params=params)
    return sum(part.total for part in both)


def _eager(case: Case, device: Device) -> dict[str, float]:
    with torch.device("meta"):
        plain = PlainBlock(case.shape).bfloat16()
    eager = HuggingFaceBlock(plain)
    x = torch.empty(case.batch, case.tokens, case.shape.d_model, device="meta", dtype=torch.bfloat16)
    x.requires_grad_()

    def step(module: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        weights = eager.weights() if module is not plain else list(plain.parameters())
        return lambda: torch.autograd.grad(module(x), [x, *weights], torch.empty_like(x))

    def replayed(x: Tensor) -> Tensor:
        return checkpoint(eager, x, use_reentrant=False)

    named: dict[str, Callable[[Tensor], Tensor]] = {"eager": eager, "eager checkpoint": replayed, "eager fused": plain}
    return {name: step_seconds(step(module), device) for name, module in named.items()}


def of(times: Mapping[str, Times], ideal: Ideals) -> list[dict[str, Any]]:
    """The goals of those that were measured."""
    found = []
    for first, second, limit, at_least in GOALS:
        if first in times and second in times:
            best = ideal.milliseconds
            ratio = round(best[first] / best[second], 3) if first in best and second in best else None
            value = times[first].median / times[second].median
            found.append(Goal(f"{first} / {second}", value, limit, at_least, ratio).row())
    return found


def main() -> None:
    """Prints the ideal ratios of a Llama-3-8B block on the GPUs whose rates are known."""
    known = {name: ideals(LLAMA_3_8B, device).milliseconds for name, device in DEVICES.items()}
    rows: list[list[object]] = [
        [
            *(f"{first} / {second}", f"{'≥' if at_least else '≤'} {limit:g}"),
            *(f"{best[first] / best[second]:.3f}" for best in known.values()),
        ]
        for first, second, limit, at_least in GOALS
    ]
    rows += [[f"{name}, ms", "", *(f"{best[name]:.1f}" for best in known.values())] for name in known["h200"]]
    print(table(["", "wanted", *known], rows))


def too_good(goals: list[dict[str, Any]]) -> list[str]:
    """Goals that are met too well: what to look into before it is reported."""
    return [
        f"{goal['name']}: {goal['value']:.3f}, its floor {goal['ideal']}: work was skipped, or the second is slow"
        for goal in goals
        if goal["ideal"] and goal["name"].startswith("ckptfused") and goal["value"] < FLOOR * goal["ideal"]
    ]


if __name__ == "__main__":
    main()
