"""The text form of a spec: `key=value` words, which C++ parses once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .adapters import parse_adapters
from .fields import AttentionSpec, BlockFields, FFNSpec
from .quantized import parse_quantized
from .table import Row, rows

HALVES: dict[str, type[AttentionSpec] | type[FFNSpec]] = {"attn": AttentionSpec, "ffn": FFNSpec}


def format_value(value: object) -> str:
    """Bools as 0 and 1, floats so that they read back the same, names, adapters and stored weights joined by +."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


def row_words(spec: object, prefix: str = "") -> Iterator[str]:
    """The words of a spec's own fields, defaults left out."""
    for row in rows(type(spec)):
        value = getattr(spec, row.name)
        if row.required or value != row.default:
            yield f"{prefix}{row.name}={format_value(value)}"


def text_of(spec: BlockFields) -> str:
    """The words of a spec, defaults left out, in the order of the table: the block's, then each half's."""
    halves = (row_words(half, f"{name}.") for name, half in spec.halves.items())
    return " ".join(
        ["halves=" + "+".join(spec.halves), *row_words(spec), *(word for words in halves for word in words)]
    )


def parse_value(row: Row, key: str, text: str) -> Any:
    """The value of a field. **Raises** `ValueError`."""
    kind = row.type.split(" | ")[0]
    if kind == "bool" and text in ("0", "1"):
        return text == "1"
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        pass
    if kind == "names":
        return tuple(text.split("+")) if text else ()
    if kind == "adapters":
        return parse_adapters(key, text)
    if kind == "quantized":
        return parse_quantized(key, text)
    if kind == "str" or row.type == "bool | 'shared'":  # whether it is 'shared' is for the spec to check
        return text
    raise ValueError(f"spec: {key}: expected a value of type {row.type}, got {text!r}")


def row_values(kind: type, words: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """The fields of a spec's class; their words are taken out of `words`."""
    values = {}
    for row in rows(kind):
        key = prefix + row.name
        if key in words:
            values[row.name] = parse_value(row, key, words.pop(key))
        elif row.required:
            raise ValueError(f"spec: expected {key}=…, which has no default, and it is missing")
    return values


def split_words(text: str) -> dict[str, str]:
    """The words of a text by key. **Raises** `ValueError`."""
    words: dict[str, str] = {}
    for word in text.split():
        key, sep, value = word.partition("=")
        if not sep or key in words:
            raise ValueError(f"spec: expected key=value words, each key once, got {word!r} in {text!r}")
        words[key] = value
    return words


def refuse_unknown(words: dict[str, str], text: str) -> None:
    """Raise `ValueError` where a word has not been taken."""
    for key in words:
        raise ValueError(f"spec: unknown key {key!r} in {text!r}")


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a block by its text form, the inverse of `text_of`. **Raises** `ValueError`."""
    words = split_words(text)
    halves = words.pop("halves", "")
    if halves not in ("attn", "ffn", "attn+ffn"):
        raise ValueError(f"spec: expected halves=attn, ffn or attn+ffn, got {halves!r} in {text!r}")
    values: dict[str, Any] = {
        name: HALVES[name](**row_values(HALVES[name], words, f"{name}.")) for name in halves.split("+")
    }
    values |= row_values(BlockFields, words)
    refuse_unknown(words, text)
    return values
