"""Where a replay first computed something else than its forward, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import nn

from ckptfused.doctor.regions import Region, RegionEvent

Name = Callable[[nn.Module | None], str]

DROPOUT = "dropout"
_ROUTER = re.compile(r"router|gat(e|ing)(?!_?(up|proj))|moe|topk|switch", re.IGNORECASE)
_CAST = (
    "enter autocast, or what else casts, inside what is checkpointed; PyTorch's checkpoint and ckptfused.checkpoint "
    "replay autocast alone"
)
_AROUND = ("mode", "autocast")
_SAME_STATE = "from the same state of the global generators"
ROUNDINGS = 32
"""By how many roundings of its norm an operation that is not deterministic may move a tensor's sum or norm."""
_INTEGERS = ("torch.int64", "torch.int32", "torch.int16", "torch.uint8")


@dataclass(frozen=True)
class Cause:
    """Why two runs of the same modules differ."""

    place: str
    text: str
    mend: str
    certain: bool = False
    """Whether no operation that is not deterministic could have made the difference."""


def cause_of(region: Region, name: Name, written: Container[int] = ()) -> Cause | None:
    """The cause of the first difference between a region's forward and its replays; None where all is the same.

    written: the parameters, by `id`, that the step wrote.
    """
    for replay in region.replays:
        found = difference(region.forward, _aligned(region, replay), name, region, written)
        if found is not None:
            return found
    return None


def surroundings(region: Region, name: Name) -> Cause | None:
    """The first module that a replay found in another mode, or under another autocast; None where there is none."""
    for replay in region.replays:
        for a, b in zip(region.forward, _aligned(region, replay), strict=False):
            if a.module is not b.module or a.begins is not b.begins:
                break
            found = _state(a, b, name(a.module), "its replay", _AROUND) if a.begins else None
            if found is not None:
                return found
    return None


def _aligned(region: Region, replay: list[RegionEvent]) -> list[RegionEvent]:
    """A replay without the call of the owner, where the forward was noted from within that call."""
    first = region.forward[0].module if region.forward else None
    if replay and replay[0].module is region.owner and first is not region.owner:
        return [event for event in replay if event.module is not region.owner]
    return replay


def difference(
    before: list[RegionEvent],
    after: list[RegionEvent],
    name: Name,
    region: Region | None = None,
    written: Container[int] = (),
) -> Cause | None:
    """The cause of the first difference between two lists of calls.

    The shorter one ends it: a replay stops as soon as it has what backward needs, mostly within a module.
    """
    when = "its replay" if region is not None else "a step that saves everything"
    running: list[int] = []
    for i, (a, b) in enumerate(zip(before, after, strict=False)):
        begun = running[-1] if running else None
        if a.module is not b.module or a.begins is not b.begins:
            outer = region.owner if begun is None and region else None if begun is None else before[begun].module
            state = None if begun is None else _state(before[begun], after[begun], name(outer), when, _AROUND)
            return state or Cause(
                name(outer),
                f"{when} called other modules than its forward: {_called(b, name)} where that had {_called(a, name)}",
                "let its control flow depend on its inputs alone",
                certain=True,
            )
        if a.values != b.values:
            found = _of_code(begun, i, before, after, name, region, when, written)
            return replace(found, certain=found.certain or _far(a, b))
        if a.begins:
            running.append(i)
        elif not a.saved:
            running.pop()
    return None


def _called(event: RegionEvent, name: Name) -> str:
    return "what it saves for backward" if event.saved else name(event.module)


def _far(a: RegionEvent, b: RegionEvent) -> bool:
    """Whether values are further apart than the order of sums could put them."""
    pairs = zip(a.sizes, b.sizes, strict=False)
    return any(
        abs(one - other) > ROUNDINGS * torch.finfo(dtype).eps * max(x.value[1], y.value[1])
        for (dtype, x), (_, y) in pairs
        for one, other in zip(x.value, y.value, strict=True)
    )


def _of_code(
    begun: int | None,
    i: int,
    before: list[RegionEvent],
    after: list[RegionEvent],
    name: Name,
    region: Region | None,
    when: str,
    written: Container[int],
) -> Cause:
    """Code made something else of the same values: arguments of a module, its results, or what it saves for backward.

    begun: where the module of that code begins; None for the function that is checkpointed.
    """
    event, owner = before[i], region.owner if region else None
    module = owner if begun is None else before[begun].module
    place = name(module)
    results = not event.begins and not event.saved
    if region is not None and region.changed and not results:
        return Cause(
            name(owner or event.module),
            f"{joined_words(region.changed)} was changed in place between its forward and its replay, which computes "
            "with the new values",
            "change a clone, change it after backward, or use ckptfused.checkpoint, which refuses it",
        )
    state = None if begun is None else _state(before[begun], after[begun], place, when, _AROUND)
    if state is None:
        code = f"its own code before {name(event.module)}" if event.begins else _who(module)
        state = _drawn_within(begun, i, before, after, place, code, when)
    if begun is not None and (state is None or state.text.endswith(_SAME_STATE)):
        state = _state(before[begun], after[begun], place, when) or state
    if state is None:
        old, new = _types(event), _types(after[i])
        if old != new:
            state = Cause(place, f"a cast: its results are {old} in forward and {new} in {when}", _CAST)
    if state is None and module is not None and not event.begins:
        state = _of_parameters(module, place, when, written)
    if state is None:
        what = f"{_who(module)} gave other results"
        if event.begins:
            what = f"its own code gave {name(event.module)} other values"
        elif event.saved:
            what = "its own code computed other values for backward"
        state = Cause(
            place,
            f"{what} in {when} than in forward, from the same inputs",
            "look there for state that is kept between calls (iterators, counters, clocks, closures, globals, caches), "
            "and for operations that are not deterministic",
        )
    if begun is not None and module is not None and not event.begins:
        a, b = _end(before, begun), _end(after, begun)
        if a is not None and b is not None and a.values != b.values and _routes(a, b, module):
            return replace(state, text=f"a router chose otherwise in {when}: {state.text}")
    return state


def _who(module: nn.Module | None) -> str:
    return "the checkpointed function" if module is None else type(module).__name__


def _drawn_within(
    begun: int | None, i: int, before: list[RegionEvent], after: list[RegionEvent], place: str, code: str, when: str
) -> Cause | None:
    """The draw of random numbers by code itself, not by modules that it calls, which gave the same results."""
    depth, own = 0, int(begun is not None)
    for j in range(begun or 0, i):
        depth += 0 if before[j].saved else 1 if before[j].begins else -1
        if depth == own and before[j].random != before[j + 1].random:
            return _drawn(place, code, before[j : j + 2], after[j], when)
    return None


def _of_parameters(module: nn.Module, place: str, when: str, written: Container[int]) -> Cause | None:
    names = [name for name, p in module.named_parameters() if id(p) in written]
    if not names:
        return None
    return Cause(
        place,
        f"its parameters were written between its forward and {when}, which computed with the new values: "
        f"{joined_words(names)}",
        "write to parameters after backward; keep averages and codebooks in buffers, and use ckptfused.checkpoint",
    )


def _end(events: list[RegionEvent], begun: int) -> RegionEvent | None:
    """Where a call of a module ends that begins at a place; None where what was noted stops before."""
    depth = 0
    for event in events[begun:]:
        depth += 0 if event.saved else 1 if event.begins else -1
        if depth == 0:
            return event
    return None


def _routes(a: RegionEvent, b: RegionEvent, module: nn.Module) -> bool:
    """Whether a module's results are choices: whole numbers that differ, or its name says so."""
    if _ROUTER.search(type(module).__name__):
        return True
    pairs = zip(a.values, b.values, strict=False)
    return any(isinstance(x, tuple) and str(x[1]) in _INTEGERS and x != y for x, y in pairs)


def _drawn(place: str, who: str, before: list[RegionEvent], after: RegionEvent, when: str) -> Cause:
    """before: the events of the forward between which it drew."""
    states = zip(before[0].random, before[1].random, after.random, strict=False)
    if any(a != b and a != replayed for a, b, replayed in states):
        return Cause(
            place,
            f"{who} drew its random numbers anew in {when}: dropout has another mask there",
            "replay random states: preserve_rng_state=True; generators other than PyTorch's default ones are replayed "
            "by ckptfused.checkpoint",
            certain=True,
        )
    return Cause(
        place,
        f"{who} drew other random numbers in {when} {_SAME_STATE}",
        "draw from a generator that the checkpoint replays: PyTorch's default one, or any with ckptfused.checkpoint",
    )


def _state(
    before: RegionEvent, after: RegionEvent, place: str, when: str, facts: tuple[str, ...] | None = None
) -> Cause | None:
    """What a module was found with, where that was another in the second run. facts: those to look at."""
    a, b = before.facts, after.facts
    for fact in sorted(a.keys() | b.keys(), reverse=True) if facts is None else facts:  # mode first, then buffers
        old, new = a.get(fact), b.get(fact)
        if old == new or repr(old) == repr(new):  # no number at all is no other
            continue
        if fact == "mode":
            return Cause(
                place,
                f"it was in {old} mode in forward and in {new} mode in {when}",
                "leave modes alone between forward and backward",
            )
        if fact == "autocast":
            text = (
                f"a cast: it computed under autocast {joined_words(old)} in forward and {joined_words(new)} in {when}"
            )
            return Cause(place, text, _CAST)
        kind, _, which = fact.partition(" ")
        if kind == "generator":
            return Cause(
                place,
                f"it drew its random numbers anew in {when}, from a generator of its own ({which!r})",
                "draw from PyTorch's default generator, or use ckptfused.checkpoint, which replays any",
            )
        if kind == "buffer":
            return Cause(
                place,
                f"its buffer {which!r} was updated between its forward and {when}, which computed with the new values",
                "use ckptfused.checkpoint, which replays with the buffers that forward found",
            )
        return Cause(
            place,
            f"its attribute {which!r} was {old!r} in forward and {new!r} in {when}",
            "keep no state in forward that it reads itself, or use ckptfused.checkpoint, which replays attributes",
        )
    return None


def _types(event: RegionEvent) -> str:
    return joined_words(sorted({str(v[1]).removeprefix("torch.") for v in event.values if isinstance(v, tuple)}))


def joined_words(words: object) -> str:
    """Words with commas."""
    return ", ".join(map(str, words))  # type: ignore[call-overload]
