"""A profile as a person reads it. profile: a `Profile`, which this is a part of."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from ckptfused.profiler.phases import LayerProfile
from ckptfused.simulate.cards import CARDS, fitting
from ckptfused.sizes import size
from ckptfused.state.generators import undrawn

MOST_ALIVE = 6
_COLUMNS = ("", "saved", "forward +", "backward +", "gradients", "forward", "backward")


def rich_table(profile: Any) -> Any:
    """For `rich.print`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in _COLUMNS:
        table.add_column(title, justify="right" if title else "left", overflow="fold")
    for row in _rows(profile):
        table.add_row(*row)
    return Group(*map(Text, _begin(profile)), Text(), table, Text(), *map(Text, _end(profile)))


def text(profile: Any) -> str:
    """The table as text, by rich where that is installed."""

    def plain() -> str:
        rows = ["  ".join(row) for row in (_COLUMNS, *_rows(profile))]
        return "\n".join([*_begin(profile), "", *rows, "", *_end(profile)])

    return printed(lambda: rich_table(profile), plain)


def printed(rich: Callable[[], Any], plain: Callable[[], str]) -> str:
    """What rich prints, as text, as wide as `COLUMNS` says; without rich, a plainer text."""
    try:
        with undrawn():  # rich draws numbers as it is imported, and for its styles
            from rich.console import Console

            out = io.StringIO()
            Console(file=out, width=int(os.environ.get("COLUMNS", 120)), color_system=None).print(rich())
    except ModuleNotFoundError:
        return plain()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def duration(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:,.3f} s" if seconds else "0 s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def conditions(profile: Any) -> str:
    """What is not as in the simplest step."""
    under = f", forward under autocast to {profile.autocast}" if profile.autocast else ""
    batches = profile.gradient_accumulation_steps
    under += ", weights updated in backward" if profile.release else ""
    return under + (f", gradients accumulated over {batches} batches" if batches > 1 else "")


def _begin(profile: Any) -> Iterator[str]:
    way = f"{profile.way} for {profile.device}{conditions(profile)}"
    yield f"A step {way}: peak {size(profile.peak)}, at {profile.moment}"
    names = ("weights", "optimizer", "gradients", "activations", "loss_head", "transients")
    yield "of which " + ", ".join(f"{name.replace('_', ' ')} {size(getattr(profile, name))}" for name in names)
    batches = profile.gradient_accumulation_steps
    times = f"{batches} × " if batches > 1 else ""
    spans = [(f"{times}forward", profile.forward_seconds), (f"{times}backward", profile.backward_seconds)]
    spans += [("optimizer", profile.optimizer_seconds)] if profile.optimizer_seconds else []
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spans)
    yield f"time {duration(profile.seconds)}: {parts}"
    if profile.fragmentation:
        yield f"fragmentation {size(profile.fragmentation)}: reserved by the allocator beyond what was handed out"
    if profile.host:
        yield f"host memory {size(profile.host)}: inputs of layers, until backward needs them"


def _rows(profile: Any) -> Iterator[tuple[str, ...]]:
    for _, run in groupby(profile.parts, key=_alike):
        found = list(run)
        name = found[0].name if len(found) == 1 else f"{found[0].name} … {found[-1].name} (each of {len(found)})"
        sizes = (found[0].saved, found[0].forward_transient, found[0].backward_transient, found[0].gradients)
        times = (sum(f.forward_seconds for f in found), sum(f.backward_seconds for f in found))
        yield (name, *map(size, sizes), *(duration(seconds / len(found)) for seconds in times))


def _alike(part: LayerProfile) -> tuple[int, ...]:
    return part.saved, part.forward_transient, part.backward_transient, part.gradients


def _end(profile: Any) -> Iterator[str]:
    card = CARDS.get(profile.device) if profile.way == "predicted" else None
    if card is not None:
        fits = fitting(profile.peak)
        answer = "yes" if card.name in fits else f"no, it needs {size(profile.peak - card.usable)} less"
        yield f"fits into one {card.name} ({card.memory:g} GiB, of which a step may need {size(card.usable)}): {answer}"
        yield f"cards into which it fits: {', '.join(fits) or 'none that is known'}"
    if profile.alive:
        yield "alive at the peak:"
        yield from (f"  {size(row.bytes):>12}  {row.kind}, {row.place}: {row.op}" for row in profile.alive[:MOST_ALIVE])
    if profile.way == "predicted":
        known = "not measured on such a device" if profile.time_error is None else f"up to {profile.time_error:.0%}"
        yield f"error of the predicted time: {known}"
    yield from (f"note: {note}" for note in profile.notes)
