"""Low-rank adapters (LoRA) beside the projections of a block: their description and its text form."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_choice, check_integer, check_number, check_probability

FIRST_SITE = 4
MOST_ADAPTERS = 252
"""The most adapters of a block: a dropout site is a number below 256."""


@dataclass(frozen=True)
class Adapter:
    """`y += scale * b(a(drop(x)))` beside the projection y of x, as PEFT's LoRA computes it.

    **Shapes** a [rank, in], b [out, rank] and, where the adapter has one, bias [out] (times scale, too), of any
    floating dtype; `out` is the joint width where the projection is joint.
    **Source** Hu et al. 2021 (arXiv 2106.09685), section 4.1; `peft.tuners.lora.Linear`.
    """

    target: str
    """`"q"`, `"k"`, `"v"`, `"o"`; `"gate"`, `"up"`, `"down"`. A joint tensor has the first one's name."""
    rank: int
    scale: float = 1.0
    p: float = 0.0
    """Dropout of the adapter's input."""

    def __str__(self) -> str:
        # Numbers that read back the same; no sign in an exponent, which would part two adapters.
        return f"{self.target}:{self.rank}:{self.scale!r}:{self.p!r}".replace("e+", "e")

    @classmethod
    def parse(cls, key: str, text: str) -> Adapter:
        """The inverse of `str`. **Raises** `ValueError`."""
        try:
            target, rank, scale, p = text.split(":")
            return cls(target, int(rank), float(scale), float(p))
        except ValueError:
            raise ValueError(f"spec: {key}: expected target:rank:scale:p, got {text!r}") from None


def parse_adapters(key: str, text: str) -> tuple[Adapter, ...]:
    """The adapters of a text form, joined by +. **Raises** `ValueError`."""
    return tuple(Adapter.parse(key, part) for part in text.split("+"))


def checked_adapters(where: str, adapters: object, targets: tuple[str, ...]) -> tuple[Adapter, ...]:
    """The adapters of a half with Python's own numbers; raise unless each is well-formed and has one of the targets."""
    if not isinstance(adapters, tuple) or not all(isinstance(adapter, Adapter) for adapter in adapters):
        raise TypeError(f"{where}: expected a tuple of Adapter, got {adapters!r}")
    checked = []
    for index, adapter in enumerate(adapters):
        check_choice(f"{where}[{index}].target", adapter.target, targets)
        rank = check_integer(f"{where}[{index}].rank", adapter.rank, 1)
        scale = check_number(f"{where}[{index}].scale", adapter.scale)
        checked.append(Adapter(adapter.target, rank, scale, check_probability(f"{where}[{index}].p", adapter.p)))
    return tuple(checked)
