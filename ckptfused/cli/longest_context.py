"""The longest sequence that fits into a card's memory."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.profiler.api import profile
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, adamw
from ckptfused.simulate.values import LARGEST
from ckptfused.sizes import size


class Longest(NamedTuple):
    """What was found; `tokens` 0: not even the shortest sequence fits, and `profile` is what that would need."""

    tokens: int
    profile: Profile
    refused: str = ""
    """Why the model takes no longer sequence, where that and not memory is the limit."""
    steps: tuple[tuple[int, int], ...] = ()
    """Tokens and peak bytes of every step that was predicted, by tokens."""


def token_batch(model: nn.Module, sequences: int, tokens: int) -> dict[str, Tensor]:
    """What a language model learns: so many sequences of so many tokens, [sequences, tokens] integers. None of them is
    padding, for models may count positions by that (RoBERTa); without data where a prediction would look at none."""
    device = "cpu" if sequences * tokens <= LARGEST else "meta"
    ids = torch.full((sequences, tokens), int(getattr(model.config, "pad_token_id", None) == 0), device=device)
    return {"input_ids": ids, "labels": ids}


def language_step(model: nn.Module, tokens: int, sequences: int = 1, **options: Any) -> Profile:
    """`profile`, with these options, of a language model that learns `token_batch`."""
    options.setdefault("optimizer", adamw)
    options.setdefault("device", "h200")
    return profile(model, token_batch(model, sequences, tokens), **options)


def resized_batch(batch: Batch, sequences: int | None = None, tokens: int | None = None) -> Batch:
    """A batch with as many sequences, or as long ones, as are asked for: its values repeat, those of fractions and ids
    are on the meta device. **Raises** `ValueError` for longer sequences of what has none, [B, T] integers."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 0]
    ids = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point()), None)
    if not tensors or (tokens is not None and ids is None):
        raise ValueError("batch: expected tensors of [sequences, tokens], got a batch without")
    sizes = {0: (tensors[0].size(0), sequences), 1: (0 if ids is None else ids.size(1), tokens)}

    def other(t: Any) -> Any:
        for dim, (own, asked) in sizes.items():
            if isinstance(t, Tensor) and asked is not None and t.dim() > dim and t.size(dim) == own:
                t = t.to("meta") if t.is_floating_point() else t
                t = t.index_select(dim, torch.arange(asked, device=t.device) % own)
        return t

    return tree_map(other, batch)


def longest(
    step_of: Callable[[int], Profile],
    budget: int,
    step: int = 256,
    most: int = 1 << 22,
    first: int = 2048,
    least: Callable[[int], int] = lambda count: 0,
    host: float = inf,
) -> Longest:
    """A multiple of `step` tokens that fits into `budget` bytes where `step` more, or `most`, would not.

    first: how many are tried first. Tokens may as well be sequences, of which `step_of` predicts as many. least: bytes
    that a step of so many takes at least, for which none is predicted that cannot fit. host: bytes of host memory that
    inputs of layers may take.

    Between a length that fits and one that does not the next guess is where a straight line between them meets the
    first limit; where that did not halve the gap, the middle. A length that the model does not take, beyond its
    positions, is one that does not fit. **Raises** what `step_of` raises for the shortest; `ValueError` where already
    `least` of the shortest is too much.
    """
    if (bytes_ := least(step)) > budget:
        raise ValueError(
            f"expected a batch of which a step fits into {size(budget)}: the result of one layer alone takes "
            f"{size(bytes_)}"
        )
    refused: dict[int, str] = {}
    known: dict[int, Profile] = {}

    def tried(count: int) -> Profile | None:
        if least(count * step) > budget:
            return None
        try:
            known[count] = step_of(count * step)
            return known[count]
        except ValueError as error:
            if count == 1:
                also = f"; {step:,} is the shortest that is tried, --step takes a smaller one" if step > 1 else ""
                raise ValueError(f"{error}{also}") from None
            refused[count] = str(error)
            return None

    def answer(count: int, found: Profile, why: str = "") -> Longest:
        return Longest(count * step, found, why, tuple((n * step, known[n].peak) for n in sorted(known)))

    def within(found: Profile) -> bool:
        return found.peak <= budget and found.host <= host

    fits, exceeds = 0, max(1, first // step)
    low = high = tried(exceeds)
    while high is not None and within(high):
        if exceeds * step >= most:
            return answer(exceeds, high)
        fits, exceeds, low = exceeds, 2 * exceeds, high
        high = tried(exceeds)
    if fits == 0 or low is None:
        fits, low = 1, known.get(1) or tried(1)
        assert low is not None
        if not within(low):
            return answer(0, low)
    halved = True
    while exceeds - fits > 1:
        gap = exceeds - fits
        share = _share(low, high, budget, host) if halved and high is not None else 0.5
        guess = min(max(fits + int(gap * share), fits + 1), exceeds - 1)
        found = tried(guess)
        if found is not None and within(found):
            fits, low = guess, found
        else:
            exceeds, high = guess, found
        halved = 2 * (exceeds - fits) <= gap
    return answer(fits, low, refused.get(exceeds, ""))


def _share(low: Profile, high: Profile, budget: int, host: float) -> float:
    """How far from a step that fits to one that does not a straight line meets the first limit."""
    limits = ((low.peak, high.peak, budget), (low.host, high.host, host))
    return min((limit - a) / (b - a) for a, b, limit in limits if b > limit)
