"""The text of a call's spec, remembered by keys: the fields of a spec by value; and the shapes that it expects."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

from ckptfused.compat.torch_compile import constant_result
from ckptfused.spec import (
    MOST_TEXTS,
    PROJECTION_SLOTS,
    Adapter,
    AttentionSpec,
    BlockSpec,
    FFNSpec,
    Quantized,
    keepable,
    param_names,
    param_shapes,
    parse,
    quantized_slots,
)
from ckptfused.spec.table import rows

SpecKey = tuple[Hashable, ...]


def _key(name: str, half: type, called: bool = False) -> Any:
    """A class of keys, which have the fields of a half's spec that a call decides, or those that the layer does."""
    made = namedtuple(name, [row.name for row in rows(half) if row.key.called is called])  # type: ignore[misc]
    made.__module__ = __name__
    return made


AttentionKey = _key("AttentionKey", AttentionSpec)
CallKey = _key("CallKey", AttentionSpec, called=True)
FFNKey = _key("FFNKey", FFNSpec)


class Expected(NamedTuple):
    """What a slot takes: "norm" tensors have any floating type, "projection" ones that of x, or what autocast casts;
    "adapter" ones float32 beside, "stored" ones so many bytes: of a weight in few bits.
    """

    name: str
    shape: tuple[int, ...]
    kind: str


class Mode(NamedTuple):
    """What a caller decides of a layer, as the text of its spec takes it."""

    keep: str = "inputs"
    """What it keeps for backward beside its input, as `keep_text` gives it."""
    scratch: int = 0
    """Bytes of hidden-wide scratch above which its FFN goes in tiles; 0: by device."""

    @property
    def inputs_alone(self) -> bool:
        """Whether it keeps nothing beside the inputs of its ops."""
        return self.keep in ("inputs", "=")


def keep_text(keep: Any) -> str:
    """A preset's name as it is; explicit names as `"=attn+mid"`. **Raises** `TypeError` for anything else."""
    if isinstance(keep, str):
        return keep
    try:
        return "=" + "+".join(keep)
    except TypeError as error:
        raise TypeError(f"keep: expected a preset's name or an iterable of names, got {keep!r}") from error


def kept_names(keep: str) -> tuple[str, ...] | str:
    """The inverse of `keep_text`: the names, or the name of a preset."""
    return tuple(filter(None, keep[1:].split("+"))) if keep.startswith("=") else keep


@constant_result
def half_text(
    attn: SpecKey | None,
    inputs: SpecKey,
    ffn: SpecKey | None,
    parallel: bool | str,
    seq_first: bool,
    keep: str,
    scratch: int,
) -> str:
    """The text of a spec of these keys. Of the names to keep of a whole layer, one half keeps those that it has."""
    return _text(attn, inputs, ffn, parallel, seq_first, keep, scratch)


@lru_cache(maxsize=MOST_TEXTS)
def _text(
    attn: SpecKey | None, inputs: SpecKey, ffn: SpecKey | None, parallel: Any, seq_first: bool, keep: str, scratch: int
) -> str:
    first = None if attn is None else AttentionSpec(**_fields(AttentionKey, attn), **_fields(CallKey, inputs))
    second = None if ffn is None else FFNSpec(**_fields(FFNKey, ffn))
    scratch = 0 if second is None else scratch
    spec = BlockSpec(first, second, parallel=parallel, scratch=scratch, seq_first=seq_first)
    names = kept_names(keep)
    if isinstance(names, tuple) and (first is None or second is None):
        names = tuple(name for name in names if name in keepable(spec))
    return spec.with_keep(names).to_string()


def _fields(kind: Any, key: SpecKey) -> dict[str, Any]:
    fields: dict[str, Any] = dict(zip(kind._fields, key, strict=True))
    if "lora" in fields:
        fields["lora"] = tuple(Adapter(*adapter) for adapter in fields["lora"])
        fields["quant"] = tuple(Quantized(*stored) for stored in fields["quant"])
    return fields


@constant_result
def expected(text: str, width: int) -> tuple[Expected | None, ...]:
    """What each slot of a call with this text takes, x being so wide; None for a slot without a tensor."""
    return _expected(text, width)


@lru_cache(maxsize=MOST_TEXTS)
def _expected(text: str, width: int) -> tuple[Expected | None, ...]:
    spec = parse(text)
    shapes, stored = param_shapes(spec, width), quantized_slots(spec)
    return tuple(
        Expected(name, shapes[name][0], "stored" if name in stored else _kind(name)) if name in shapes else None
        for name in param_names(spec)
    )


def _kind(slot: str) -> str:
    return "projection" if slot in PROJECTION_SLOTS else "adapter" if ".lora" in slot else "norm"


def settled(value: Any) -> Any:
    """A number as torch.compile's constant, which would otherwise trace a changed float as a symbol."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(value) if isinstance(value, int | float) else value
