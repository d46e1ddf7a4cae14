"""A plan as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from ckptfused.profiler.plot import FAR, canvas, label_points
from ckptfused.profiler.table import conditions, duration, printed
from ckptfused.simulate.cards import CARDS, GIB
from ckptfused.sizes import byte_unit, counted, second_unit, size


def rich_plan(plan: Any) -> Any:
    """For `rich.print`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shards = f", each of {plan.shards} ranks" if plan.shards > 1 else ""
    head = Text(f"{_first(plan)}{shards}\n{policy_line(plan.policy)}")
    layers = Table("layers", "count", "mode")
    place = 0
    for mode, run in groupby(plan.policy.layers):
        count = len(list(run))
        layers.add_row(str(place) if count == 1 else f"{place} … {place + count - 1}", str(count), str(mode))
        place += count
    others = Table("policy", "peak", "a step", "fits")
    for column in others.columns[1:3]:
        column.justify = "right"
    for point in (*plan.standard, ("this plan", plan.peak, plan.seconds)):
        name, peak, seconds = point
        others.add_row(name, size(peak), duration(seconds), "yes" if peak <= plan.budget else "no")
    return Group(head, layers, others, *map(Text, plan.notes))


def _first(plan: Any) -> str:
    needs = f"{size(plan.peak)} of {size(plan.budget)}, {duration(plan.seconds)} a step"
    return f"{needs}, predicted for {plan.device}{conditions(plan.profile)}"


def policy_line(policy: Any) -> str:
    """What a policy says beside its layers."""
    said = [f"policy {policy.digest}"]
    said += [counted(policy.segment_count, "segment")] if policy.segment_count is not None else []
    said += [f"segments of {', '.join(map(str, policy.segment_lengths))}"] if policy.segment_lengths else []
    said += [f"loss={policy.loss!r}"] if policy.loss is not None else ["loss as it was"]
    said += [f"loss_scratch={policy.loss_scratch:,} bytes"] if policy.loss_scratch is not None else []
    return ", ".join(said)


def plan_table(plan: Any) -> str:
    """The same as text; without rich, fewer words."""
    return printed(lambda: rich_plan(plan), lambda: "\n".join((_first(plan), str(plan.policy), *plan.notes)))


def plan_json(plan: Any) -> str:
    """JSON."""
    points = {name: [point._asdict() for point in getattr(plan, name)] for name in ("front", "standard")}
    for point in points["front"]:
        del point["name"]
    sizes = {name: getattr(plan, name) for name in ("budget", "peak", "seconds", "device", "shards")}
    step = {name: getattr(plan.profile, name) for name in ("autocast", "gradient_accumulation_steps", "release")}
    policy = {"digest": plan.policy.digest, "policy": plan.policy.to_dict()}
    return json.dumps(sizes | step | policy | points | {"notes": list(plan.notes)}, indent=2)


def plan_picture(plan: Any, path: str) -> None:
    """Memory against time."""
    figure, axes = canvas(8, 5)
    points = [*plan.standard, *plan.front, ("", plan.peak, plan.seconds)]
    low, high = (pick(peak for _, peak, _ in points) for pick in (min, max))
    (unit, name), (scale, of_time) = byte_unit(high), second_unit(max(seconds for *_, seconds in points))
    peaks, seconds = [point.peak / unit for point in plan.front], [point.seconds / scale for point in plan.front]
    if len(peaks) > 1:
        axes.step(peaks, seconds, where="post", color="tab:blue", label="the fastest for each memory")
    axes.plot(plan.peak / unit, plan.seconds / scale, "*", color="tab:red", markersize=16, label="this plan")
    by_hand = [(_SAID.get(name, name), peak / unit, took / scale) for name, peak, took in plan.standard]
    axes.plot([x for _, x, _ in by_hand], [y for *_, y in by_hand], "o", color="black", markersize=5)
    lines = [("budget", plan.budget, "--")]
    if plan.device in CARDS:
        lines.append((f"one {plan.device}", int(CARDS[plan.device].memory * GIB), ":"))
    room = (FAR - 1) * max(high - low, high / 20)
    far = []
    for said, place, style in lines:
        if low - room <= place <= high + room:
            axes.axvline(place / unit, color="grey", linestyle=style, label=f"{said}, {size(place)}")
        else:
            far.append(f"{said}, {size(place)} →" if place > high else f"← {said}, {size(place)}")
    axes.set(xlabel=f"peak memory of a step, {name}", ylabel=f"{of_time} a step")
    axes.set_title(f"Predicted for {plan.device}", loc="left", fontsize=10)
    axes.set_title("    ".join(far), loc="right", fontsize=8, color="grey")
    axes.grid(alpha=0.3)
    axes.margins(0.12)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.draw_without_rendering()  # where points lie is known once there is a layout
    label_points(axes, by_hand)
    figure.savefig(path, dpi=150)


_SAID = {"none": "no checkpointing"}
"""Names of policies that a picture has in other words."""
