"""Do the loss curves agree as far as they must?

Recompute is exact, so the two ckptfused curves must be the same floats. Against the plain layers they may differ by
rounding, which training amplifies step by step; so the bound is measured, not guessed. A second plain run, with
channels and hidden units renumbered, computes the same function with every sum in another order. Its distance from
the plain curve is one draw of what rounding does by that step; ours is another draw of the same size. The running
maximum of the first, over at least FIRST steps, times MARGIN, bounds the second. MARGIN is twice the largest ratio of
two such distances seen over 12 pairs of renumberings of a small model (2.2 in float32, 7.8 in bfloat16). In float32, a
gradient misdirected by two percent in a single weight leaves the bound (tests/cli/test_demo.py); in bfloat16 rounding
hides so small a fault. Scaling a gradient would not show: Adam ignores it.
"""

from __future__ import annotations

import math

FIRST = 10
MARGIN = 16.0
FLOOR = 4 * 2.0**-23  # relative: a few roundings of the float32 loss itself


def identical(ours: list[float], other: list[float]) -> str | None:
    """None if the curves are the same floats, else where they part."""
    for step, (a, b) in enumerate(zip(ours, other, strict=True)):
        if a != b or math.isnan(a):
            return f"step {step}: {a!r} keeping everything, {b!r} saving inputs only"
    return None


def rounding_bounds(plain: list[float], reordered: list[float]) -> list[float]:
    """For each step, how far from ``plain`` rounding may bring a curve."""
    distance = [abs(a - b) for a, b in zip(plain, reordered, strict=True)]
    worst = [max(distance[: max(step + 1, FIRST)]) for step in range(len(plain))]
    return [max(MARGIN * far, FLOOR * abs(loss)) for far, loss in zip(worst, plain, strict=True)]


def within_rounding(ours: list[float], plain: list[float], reordered: list[float]) -> str | None:
    """None if ``ours`` stays within the bound, else where it leaves."""
    limits = rounding_bounds(plain, reordered)
    for step, (a, b, limit) in enumerate(zip(ours, plain, limits, strict=True)):
        if not abs(a - b) <= limit:
            return (
                f"step {step}: {a:.7g} against {b:.7g}, a distance of {abs(a - b):.2g} where rounding explains "
                f"{limit:.2g}"
            )
    return None
