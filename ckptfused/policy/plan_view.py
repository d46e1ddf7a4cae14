"""A plan as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from ckptfused.policy.table import conditions, duration, printed
from ckptfused.sizes import counted, size

GIB = 2**30


def rich_table(plan: Any) -> Any:
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


def table(plan: Any) -> str:
    """The same as text; without rich, fewer words."""
    return printed(lambda: rich_table(plan), lambda: "\n".join((_first(plan), str(plan.policy), *plan.notes)))


def written(plan: Any) -> str:
    """JSON."""
    points = {name: [point._asdict() for point in getattr(plan, name)] for name in ("front", "standard")}
    for point in points["front"]:
        del point["name"]
    sizes = {name: getattr(plan, name) for name in ("budget", "peak", "seconds", "device", "shards")}
    step = {name: getattr(plan.profile, name) for name in ("autocast", "gradient_accumulation_steps")}
    policy = {"digest": plan.policy.digest, "policy": plan.policy.to_dict()}
    return json.dumps(sizes | step | policy | points | {"notes": list(plan.notes)}, indent=2)


def picture(plan: Any, path: str) -> None:
    """Memory against time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peaks, seconds = ([getattr(point, name) for point in plan.front] for name in ("peak", "seconds"))
    axes.step([p / GIB for p in peaks], seconds, where="post", color="tab:blue", label="plans that none beats")
    axes.axvline(plan.budget / GIB, color="grey", linestyle="--", label=f"budget, {plan.budget / GIB:,.1f} GiB")
    axes.plot(plan.peak / GIB, plan.seconds, "*", color="tab:red", markersize=16, label="this plan")
    for index, (name, peak, took) in enumerate(plan.standard):
        axes.plot(peak / GIB, took, "o", color="black", markersize=5)
        above = 6 if index % 2 else -12
        axes.annotate(name, (peak / GIB, took), xytext=(4, above), textcoords="offset points", fontsize=8)
    axes.set(xlabel="peak memory of a step, GiB", ylabel="seconds a step", title=f"Predicted for {plan.device}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
