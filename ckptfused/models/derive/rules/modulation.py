"""Norms whose result is multiplied and shifted by vectors of each batch element, which come from outside (adaLN) or
are drawn (stochastic depth).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.derive.rules.core import Outer
from ckptfused.models.derive.rules.pieces import Linear, NormPiece, combined

_STEMS = ("pre", "post")


class Modulated(NamedTuple):
    """The vectors of one norm of a half, by the names of what they are made of."""

    stem: str
    """What the names of its slots begin with: `"attn.pre"`, …"""
    made_of: tuple[Outer | None, ...]
    """Its own weight and bias, [C], and the gain and shift of each batch element, [B, 1, C] or [B, 1, 1]."""

    def slots(self, outer: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Its slots and their tensors, [B, C]. outer: what stands outside, by name."""
        vectors = combined(*(None if t is None else outer[t.name] for t in self.made_of))
        for kind, vector in zip("wb", vectors, strict=True):
            if vector is not None:
                numbers = vector if vector.is_floating_point() else vector.to(x.dtype)
                yield f"{self.stem}_{kind}", numbers.expand(x.size(0), 1, x.size(2))[:, 0]


class Factor(NamedTuple):
    """One number by which all that a half adds is multiplied, by the name of what it is."""

    stem: str
    made_of: tuple[Outer]

    def slots(self, outer: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Its slot and a vector of this number, [C]. outer: what stands outside, by name."""
        number = outer[self.made_of[0].name].reshape(1)
        yield f"{self.stem}_w", (number if number.is_floating_point() else number.to(x.dtype)).repeat(x.size(2))


class Bias(NamedTuple):
    """The bias of a projection that the layer makes anew at each call, by the name of what it is."""

    stem: str
    made_of: tuple[Outer]

    def slots(self, outer: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Its slot and the bias. outer: what stands outside, by name."""
        yield f"{self.stem}_b", outer[self.made_of[0].name]


def biases(half: str, made: Mapping[str, Linear | None]) -> Iterator[Bias]:
    """The biases of a half's projections that a layer makes. **Raises** `RefusedError` where parts of one are meant."""
    for stem, one in made.items():
        if one is not None and one.bias.startswith("call:"):
            if one.rows is not None:
                raise RefusedError("parts of a bias that the layer makes", one.y.call)
            yield Bias(f"{half}.{stem}", (Outer(one.bias),))


def factors(half: str, post: NormPiece | None) -> tuple[Factor, ...]:
    """The number by which what a half adds is multiplied, where it is one that a call gives."""
    return () if post is None or not post.factor else (Factor(f"{half}.post", (Outer(post.factor),)),)


def modulated(half: str, pre: NormPiece | None, post: NormPiece | None) -> Iterator[Modulated]:
    """The norms of a half that a call gives vectors, where it gives any."""
    norms = dict(zip(_STEMS, (pre, post), strict=True))
    if not any(norm is not None and (norm.gain or norm.shift) for norm in norms.values()):
        return
    for stem, norm in norms.items():
        if norm is not None:
            own = (Outer(f"param:{name}") if name else None for name in (norm.weight, norm.bias))
            given = (Outer(name) if name else None for name in (norm.gain, norm.shift))
            yield Modulated(f"{half}.{stem}", (*own, *given))
