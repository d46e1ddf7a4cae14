"""Weights that are stored in few bits, as the frozen base of QLoRA is: their description and its text form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .checks import check_choice, check_integer


class Packing(NamedTuple):
    """How codes of a kind lie in memory: `parts` of them in each element of `dtype`, and how many bits each has."""

    bits: int
    parts: int
    dtype: str


QUANTIZATIONS: dict[str, Packing] = {
    **{kind: Packing(4, 2, "uint8") for kind in ("nf4", "fp4", "table")},
    **{kind: Packing(8, 1, "int8") for kind in ("int8", "absmax8")},
    **{f"uint{bits}": Packing(bits, 8 // bits, "uint8") for bits in (8, 4, 2, 1)},
    "uint3": Packing(3, 10, "int32"),
    **{f"gptq{bits}": Packing(bits, 32 // bits, "int32") for bits in (8, 4, 2)},
    "awq4": Packing(4, 8, "int32"),
}
"""How entries are stored: `"nf4"`, `"fp4"` as bitsandbytes' indices of 16 values, `"table"` as indices of 16 values
that are beside them, two neighbours a byte, the first one high; `"int8"` as integers, `"absmax8"` as integers of which
127 stands for the scale; `"uint8"` to `"uint1"` as HQQ's integers from an offset on, those of an element of memory far
apart, the first one high; `"gptq8"` to `"gptq2"` and `"awq4"` as integers [in, out] from a packed offset on: neighbours
along the inputs share an element of memory, the first one low, or along the outputs, in AWQ's order."""
BY_BITSANDBYTES = ("nf4", "fp4")
BY_INPUTS = ("gptq8", "gptq4", "gptq2", "awq4")
SCALES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Quantized:
    """The weight of a projection as a library stores it: codes, and a scale for each `block` of them.

    **Shapes** codes fill bytes in a row, of any dtype where bitsandbytes stores them. scale [blocks], of the type that
    `scales` names; a byte each where `nested` of them share a nested_scale. offset: of codes [blocks], or what is added
    to nested scales. table: the values of codes, 16 of `"table"`, or of nested scales, 256 of nf4 and fp4; the block of
    each input of `"gptq8"` to `"gptq2"`, int32 [in]. Of these and `"awq4"` blocks are of inputs, scales [blocks, out].
    **Source** Dettmers et al. 2023 (arXiv 2305.14314), sections 3 and 4; `bitsandbytes.functional.dequantize_4bit`;
    torchao's `Int8Tensor` and `NF4Tensor`; hqq's `Quantizer.dequantize`; gptqmodel's `dequantize_weight` and
    `dequantize_gemm`.
    """

    target: str
    """`"q"`, `"k"`, `"v"`, `"o"`; `"gate"`, `"up"`, `"down"`. A joint tensor has the first one's name."""
    kind: str
    block: int = 0
    """Entries that share a scale; 0: a row of them."""
    nested: int = 0
    """Scales that share a scale of their own; 0: none do."""
    scales: str = "float32"
    """The type of scales and offsets as numbers."""
    strided: bool = False
    """Whether a block's entries lie apart: entry i then has scale i modulo their number."""

    def __str__(self) -> str:
        return f"{self.target}:{self.form}"

    @cached_property
    def form(self) -> str:
        """Everything but whose weight it is, as the op takes it."""
        return f"{self.kind}:{self.block}:{self.nested}:{self.scales}:{int(self.strided)}"

    @classmethod
    def parse(cls, key: str, text: str) -> Quantized:
        """The inverse of `str`. **Raises** `ValueError`."""
        try:
            target, kind, block, nested, scales, strided = text.split(":")
            return cls(target, kind, int(block), int(nested), scales, bool(int(strided)))
        except ValueError:
            expected = "target:kind:block:nested:scales:strided"
            raise ValueError(f"spec: {key}: expected {expected}, got {text!r}") from None

    def block_shape(self, out: int, into: int) -> tuple[int, int]:
        """The codes of a weight [out, in] as rows, each of which has a scale; as columns where they are strided."""
        if self.strided:
            return self.block, out * into // self.block
        return -(-out * into // (self.block or into)), self.block or into

    def sizes(self, out: int, into: int) -> dict[str, int]:
        """Bytes of the stored tensors of a weight [out, in]: `"w"` and the slots beside it that are filled."""
        if self.kind in BY_INPUTS:
            return self._sizes_by_inputs(out, into)
        packing, (rows, columns) = QUANTIZATIONS[self.kind], self.block_shape(out, into)
        scales, number = columns if self.strided else rows, 4 if self.scales == "float32" else 2
        codes = -(-out * into // packing.parts)
        if self.kind == "uint3":  # rows of codes share integers, the last ones of which are not full
            codes = 4 * -(-rows // packing.parts) * columns
        found = {"w": codes, "scale": scales if self.nested else number * scales}
        if self.kind == "table":
            found |= {"offset": number, "nested_scale": number * -(-scales // self.nested), "table": number * 16}
        elif self.nested:
            found |= {"offset": 4, "nested_scale": 4 * -(-scales // self.nested), "table": 4 * 256}
        elif self.kind.startswith("uint"):
            found["offset"] = number * scales
        elif self.kind == "int8" and columns < into:
            found["offset"] = scales
        return found

    def _sizes_by_inputs(self, out: int, into: int) -> dict[str, int]:
        parts, blocks = QUANTIZATIONS[self.kind].parts, -(-into // self.block)
        number, words = 4 if self.scales == "float32" else 2, -(-out // parts)
        beside = {"scale": number * blocks * out, "offset": 4 * blocks * words}
        if self.kind == "awq4":
            return {"w": 4 * into * words, **beside}
        return {"w": 4 * -(-into // parts) * out, **beside, "table": 4 * into}


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
        checked[weight.target] = _checked(f"{where}[{index}]", weight)
    return tuple(checked.values())


def _checked(where: str, weight: Quantized) -> Quantized:
    check_choice(f"{where}.kind", weight.kind, tuple(QUANTIZATIONS))
    check_choice(f"{where}.scales", weight.scales, SCALES)
    block = check_integer(f"{where}.block", weight.block, 0)
    if (block == 0) != (weight.kind == "absmax8"):
        raise ValueError(f"{where}.block: expected {'0' if block else '1 or more'}, got {block}")
    nested = check_integer(f"{where}.nested", weight.nested, 0)
    may_nest = weight.kind in (*BY_BITSANDBYTES, "table")
    if (nested and not may_nest) or (weight.kind == "table" and not nested):
        raise ValueError(f"{where}.nested: expected {'0' if nested else '1 or more'} of {weight.kind}, got {nested}")
    if weight.strided and not weight.kind.startswith("uint"):
        raise ValueError(f"{where}.strided: expected False of {weight.kind}, got True")
    return Quantized(weight.target, weight.kind, block, nested, weight.scales, weight.strided)
