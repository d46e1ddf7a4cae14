"""Weights that are stored in few bits, as the frozen base of QLoRA is: their description and its text form."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_choice, check_integer

QUANTIZATIONS = ("nf4", "fp4", "int8")
"""How entries are stored: indices of 16 values, two a byte, or a byte for -127 … 127 with one scale a row."""


@dataclass(frozen=True)
class Quantized:
    """The weight of a projection as bitsandbytes stores it: codes, and a scale for each `block` of them.

    **Shapes** codes of 4 bits fill bytes [out · in / 2] of any dtype; int8 [out, in]. absmax float32 [blocks], or uint8
    where `nested` of them share a scale of their own, with nested_absmax float32, nested_code float32 [256] and offset.
    **Source** Dettmers et al. 2023 (arXiv 2305.14314), sections 3 and 4; `bitsandbytes.functional.dequantize_4bit`.
    """

    target: str
    """`"q"`, `"k"`, `"v"`, `"o"`; `"gate"`, `"up"`, `"down"`. A joint tensor has the first one's name."""
    kind: str
    block: int = 0
    """Entries that share a scale; 0: a row of them."""
    nested: int = 0
    """Scales that share a scale of their own; 0: none do."""

    def __str__(self) -> str:
        return f"{self.target}:{self.kind}:{self.block}:{self.nested}"

    @classmethod
    def parse(cls, key: str, text: str) -> Quantized:
        """The inverse of `str`. **Raises** `ValueError`."""
        try:
            target, kind, block, nested = text.split(":")
            return cls(target, kind, int(block), int(nested))
        except ValueError:
            raise ValueError(f"spec: {key}: expected target:kind:block:nested, got {text!r}") from None

    def sizes(self, out: int, into: int) -> dict[str, int]:
        """Bytes of the stored tensors of a weight [out, in]: `"w"` and the slots beside it that are filled."""
        if self.kind == "int8":
            return {"w": out * into, "absmax": 4 * out}
        blocks = -(-out * into // self.block)
        found = {"w": -(-out * into // 2), "absmax": blocks if self.nested else 4 * blocks}
        if self.nested:
            found |= {"nested_absmax": 4 * -(-blocks // self.nested), "nested_code": 4 * 256, "offset": 4}
        return found


def parse_quantized(key: str, text: str) -> tuple[Quantized, ...]:
    """The stored weights of a text form, joined by +. **Raises** `ValueError`."""
    return tuple(Quantized.parse(key, part) for part in text.split("+"))


def checked_quantized(where: str, weights: object, targets: tuple[str, ...], transposed: bool) -> tuple[Quantized, ...]:
    """The stored weights of a half; raise unless each is well-formed and is that of another one of the targets."""
    if not isinstance(weights, tuple) or not all(isinstance(weight, Quantized) for weight in weights):
        raise TypeError(f"{where}: expected a tuple of Quantized, got {weights!r}")
    if weights and transposed:
        raise ValueError(f"{where}: expected weights stored [out, in] (transposed=False), got transposed=True")
    checked: dict[str, Quantized] = {}
    for index, weight in enumerate(weights):
        check_choice(f"{where}[{index}].target", weight.target, tuple(t for t in targets if t not in checked))
        check_choice(f"{where}[{index}].kind", weight.kind, QUANTIZATIONS)
        block = check_integer(f"{where}[{index}].block", weight.block, 0)
        if (block == 0) != (weight.kind == "int8"):
            raise ValueError(f"{where}[{index}].block: expected {'0' if block else '1 or more'}, got {block}")
        nested = check_integer(f"{where}[{index}].nested", weight.nested, 0)
        checked[weight.target] = Quantized(weight.target, weight.kind, block, nested)
    return tuple(checked.values())
