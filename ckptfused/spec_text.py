"""The text form of a spec: `key=value` words, which C++ parses once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ckptfused.adapters import parse_adapters

if TYPE_CHECKING:
    from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec


def format_value(value: object) -> str:
    """Bools as 0 and 1, floats so that they read back the same, adapters joined by +."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


def words_of(spec: BlockSpec) -> Iterator[str]:
    """The `key=value` words of a spec, defaults left out, in order."""
    halves = {"attn": spec.attn, "ffn": spec.ffn}
    yield "halves=" + "+".join(name for name, half in halves.items() if half is not None)
    if spec.keep:
        yield "keep=" + "+".join(spec.keep)
    if spec.parallel:
        yield f"parallel={'1' if spec.parallel is True else spec.parallel}"
    if spec.seq_first:
        yield "seq_first=1"
    if spec.compute is not None:
        yield f"compute={spec.compute}"
    for name, half in halves.items():
        if half is not None:
            for f in dataclasses.fields(half):
                value = getattr(half, f.name)
                if f.default is dataclasses.MISSING or value != f.default:
                    yield f"{name}.{f.name}={format_value(value)}"


def parse_value(kind: str, key: str, text: str) -> Any:
    """The value of a field declared with type `kind`. **Raises** `ValueError`."""
    if kind == "bool" and text in ("0", "1"):
        return text == "1"
    try:
        if kind == "int":
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except ValueError:
        pass
    if kind == "str":
        return text
    if kind.startswith("tuple[Adapter"):
        return parse_adapters(key, text)
    raise ValueError(f"spec: {key}: expected a value of type {kind}, got {text!r}")


_Half = TypeVar("_Half", bound="AttentionSpec | FFNSpec")


def parse_half(kind: type[_Half], name: str, words: dict[str, str]) -> _Half:
    """Takes the words of one half out of `words`."""
    values = {}
    for f in dataclasses.fields(kind):
        key = f"{name}.{f.name}"
        if key in words:
            values[f.name] = parse_value(str(f.type), key, words.pop(key))
        elif f.default is dataclasses.MISSING:
            raise ValueError(f"spec: expected {key}=…, which has no default, and it is missing")
    return kind(**values)
