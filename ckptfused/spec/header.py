"""Writes what C++ has of the table: `make spec-header`.

It imports nothing but this folder, so that it runs before anything is built: `cd ckptfused && python -m spec.header`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from .activations import GATE, GATED_BY
from .fields import NORMS, POST_NORMS, SCALAR_TYPES, AttentionSpec, BlockFields, FFNSpec, Frame
from .keep import KEEP
from .loss import LossSpec
from .slots import ADAPTER_SLOTS, AUX_NAMES, PARAM_SLOTS, PROJECTIONS, QUANT_SLOTS
from .table import Row, rows

ROOT = Path(__file__).resolve().parents[2]
_TOP = """// Written by `make spec-header` from ckptfused/spec/. Change that, not this.
// clang-format off
#pragma once
"""
# Of a field: its type and the value that stands for a default of None, or for no default.
_TYPES = {
    "bool": ("bool", "false"),
    "int": ("int64_t", "0"),
    "float": ("double", "0.0"),
    "float | None": ("double", "0.0"),
    "str": ("std::string", '""'),
    "str | None": ("c10::ScalarType", "c10::ScalarType::Undefined"),
    "bool | 'shared'": ("Parallel", "Parallel::no"),
    "names": ("KeepSpec", "{}"),
    "adapters": ("std::vector<AdapterSpec>", "{}"),
    "quantized": ("std::vector<QuantizedSpec>", "{}"),
}
# The slots of both halves have the same names here and there.
_HALVES = {"attn": ("Attention", "Attn"), "ffn": ("FFN", "FFN")}


def _literal(row: Row) -> str:
    empty = _TYPES[row.type][1]
    if row.required or not row.default:
        return empty
    if row.default is True:
        return "true"
    return f'"{row.default}"' if row.type == "str" else repr(row.default)


def _is_norm(row: Row) -> bool:
    return row.key.allowed in (NORMS, POST_NORMS)


def _member(row: Row) -> str:
    """Where a field is in its struct: of a norm (`pre`, `pre_eps`; `qk_norm`, `qk_eps`) kind and eps are together."""
    if _is_norm(row):
        return f"{row.name.removesuffix('_norm')}.kind"
    return row.name.removesuffix("_eps") + ".eps" if row.name.endswith("_eps") else row.name


def _struct(name: str, base: str, found: Iterable[Row], meaning: str) -> Iterator[str]:
    """A struct of fields with their defaults, and `for_fields` of it."""
    named = {row.name: row for row in found}
    yield f"// {meaning}"
    yield f"struct {name}{f' : {base}' if base else ''} {{"
    for row in named.values():
        if _is_norm(row):
            stem = row.name.removesuffix("_norm")
            yield f"  NormSpec {stem}{{{_literal(row)}, {named[f'{stem}_eps'].default!r}}};  // {row.key.meaning}"
        elif not row.name.endswith("_eps"):
            yield f"  {_TYPES[row.type][0]} {row.name} = {_literal(row)};  // {row.key.meaning}"
    yield "};"
    yield "// Calls f(key, member) for each field."
    yield "template <typename F>"
    yield f"void for_fields({name}& s, F&& f) {{"
    if base:
        yield f"  for_fields(static_cast<{base}&>(s), f);"
    yield from (f'  f("{row.name}", s.{_member(row)});' for row in named.values())
    yield "}\n"


def _enum(name: str, values: Iterable[str], count: str) -> str:
    return f"enum {name} : int {{ {', '.join([*values, count])} }};"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _slot(half: str, slot: str) -> str:
    """`kQNormW`; of what is in both halves `kAttnPreW`."""
    shared = all(slot in slots for slots in PARAM_SLOTS.values())
    return f"k{_HALVES[half][1] if shared else ''}{_camel(slot)}"


def _slots() -> Iterator[str]:
    yield "// Slots of the params list. Absent halves have none. Adapters' follow, then those of quantized weights."
    for half, (name, _) in _HALVES.items():
        yield _enum(f"{name}Param", (_slot(half, slot) for slot in PARAM_SLOTS[half]), f"k{name}Params")
    yield _enum("AdapterParam", (f"k{_camel(slot)}" for slot in ADAPTER_SLOTS), "kAdapterParams")
    yield _enum("QuantParam", (f"k{_camel(slot)}" for slot in QUANT_SLOTS), "kQuantParams")
    yield _enum("AuxSlot", (f"k{_camel(name)}" for name in AUX_NAMES), "kAuxSlots")
    names = ", ".join(f'"{name}"' for name in AUX_NAMES)
    yield f"constexpr const char* kAuxNames[kAuxSlots] = {{{names}}};"
    yield "// The projections that adapters stand beside, with the slots of their weights."
    for half, (name, _) in _HALVES.items():
        found = ", ".join(f'{{"{stem}", {_slot(half, stem + "_w")}}}' for stem in PROJECTIONS[half])
        yield f"constexpr Projection k{name}Projections[] = {{{found}}};"


def spec_fields() -> str:
    """`csrc/block/spec_fields.h`: the fields with their keys and defaults, the slots, the names that are kept."""
    shared = rows(Frame)
    halves = {kind: [row for row in rows(kind) if row not in shared] for kind in (AttentionSpec, FFNSpec)}
    types = ", ".join(f'{{"{name}", c10::ScalarType::{scalar}}}' for name, scalar in SCALAR_TYPES.items())
    lines = [
        _TOP,
        *(f"#include <{name}>" for name in ("cstdint", "string", "vector")),
        '\n#include <c10/core/ScalarType.h>\n\n#include "block/spec_types.h"\n\nnamespace ckptfused {\n',
        *_struct("HalfSpec", "", shared, "What both halves share."),
        *_struct("AttentionFields", "HalfSpec", halves[AttentionSpec], "The attention half's own."),
        *_struct("FFNFields", "HalfSpec", halves[FFNSpec], "The FFN half's own."),
        "// The values that may be kept for backward, in the order in which block_fwd returns them.",
        "struct KeepSpec {",
        *(f"  bool {name} = false;  // {kept.meaning}" for name, kept in KEEP.items()),
        "};",
        "template <typename F>",
        "void for_fields(KeepSpec& s, F&& f) {",
        *(f'  f("{name}", s.{name});' for name in KEEP),
        "}\n",
        *_struct("BlockFields", "", rows(BlockFields), "The block's, beside its halves."),
        *_struct("LossFields", "", rows(LossSpec), "A loss head's."),
        f"constexpr ComputeType kComputeTypes[] = {{{types}}};\n",
        *_slots(),
        "\n}  // namespace ckptfused\n",
    ]
    return "\n".join(lines)


def activation_kinds() -> str:
    """`csrc/math/activation_kinds.h`: the activations by kind and by name."""
    functions = [name for name, gate in GATE.items() if gate is None]
    kinds = " ".join(f"X({name}, {'true' if name in GATED_BY else 'false'})" for name in functions)
    named = (
        f'    {{"{name}", Activation::{gate or name}, {"true" if gate else "false"}}},' for name, gate in GATE.items()
    )
    lines = [
        _TOP,
        "namespace ckptfused {\n",
        "// The function of the pre-activation; a gated unit is act(g) * u with one of them.",
        f"enum class Activation : int {{ {', '.join(functions)} }};",
        "// Calls X(kind, whether a gated unit has it) for each.",
        f"#define CKPT_FOR_ACTIVATIONS(X) {kinds}\n",
        "struct NamedActivation {\n  const char* name;\n  Activation act;\n  bool gated;\n};",
        "inline constexpr NamedActivation kActivations[] = {",
        *named,
        "};\n\n}  // namespace ckptfused\n",
    ]
    return "\n".join(lines)


def headers() -> dict[Path, str]:
    """The text of every generated file."""
    return {
        ROOT / "csrc/block/spec_fields.h": spec_fields(),
        ROOT / "csrc/math/activation_kinds.h": activation_kinds(),
    }


if __name__ == "__main__":
    if sys.argv[1:] or not (ROOT / "csrc").is_dir():
        sys.exit(f"usage, in a checkout: make spec-header. It writes {' and '.join(path.name for path in headers())}")
    for path, text in headers().items():
        path.write_text(text)
