"""Low-rank adapters (LoRA) beside the projections of a block: their description and its text form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfused.checks import check_choice, check_integer, check_number, check_probability

if TYPE_CHECKING:
    from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec

FIRST_SITE = 4
MOST_ADAPTERS = 252
"""Of a block: a dropout site is a number below 256."""


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


def check_adapters(name: str, half: AttentionSpec | FFNSpec, targets: tuple[str, ...]) -> None:
    """Raise unless the adapters of a half are well-formed and each has one of these targets."""
    if not isinstance(half.lora, tuple) or not all(isinstance(adapter, Adapter) for adapter in half.lora):
        raise TypeError(f"{name}.lora: expected a tuple of Adapter, got {half.lora!r}")
    for index, adapter in enumerate(half.lora):
        where = f"{name}.lora[{index}]"
        check_choice(f"{where}.target", adapter.target, targets)
        check_integer(f"{where}.rank", adapter.rank, 1)
        check_number(f"{where}.scale", adapter.scale)
        check_probability(f"{where}.p", adapter.p)
    floats = [Adapter(a.target, int(a.rank), float(a.scale), float(a.p)) for a in half.lora]
    object.__setattr__(half, "lora", tuple(floats))


def adapters_of(spec: BlockSpec) -> dict[str, Adapter]:
    """The adapters of a block by the prefix of their slots (`"attn.lora0"`), in the order of slots and sites."""
    halves = (("attn", spec.attn), ("ffn", spec.ffn))
    return {f"{n}.lora{i}": a for n, half in halves if half is not None for i, a in enumerate(half.lora)}


def adapter_input(spec: BlockSpec, prefix: str, width: int) -> int:
    """The width of the input of the projection that an adapter stands beside."""
    half, target = prefix.split(".")[0], adapters_of(spec)[prefix].target
    if target == "o":
        assert spec.attn is not None
        return spec.attn.q_width
    if target == "down":
        assert half == "ffn" and spec.ffn is not None
        return spec.ffn.hidden
    return width


def adapter_output(spec: BlockSpec, prefix: str, width: int) -> int:
    """The width of the result of that projection."""
    attn, ffn, target = spec.attn, spec.ffn, adapters_of(spec)[prefix].target
    if target in ("o", "down"):
        return width
    if prefix.startswith("attn."):
        assert attn is not None
        joint = {"q": attn.qkv_width} if attn.joint else {}
        return joint.get(target, attn.q_width if target == "q" else attn.kv_width)
    assert ffn is not None
    return ffn.gu_width if ffn.joint else ffn.hidden
