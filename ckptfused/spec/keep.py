"""What a block keeps for backward beside its input and 16 bytes of random state: names and presets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .fields import BlockFields


class Kept(NamedTuple):
    """A value that may be kept: what it is, and whether a block has it."""

    meaning: str
    exists: Callable[[BlockFields], bool]


def _has_mid(spec: BlockFields) -> bool:
    """A half alone has a sum to keep only where a closing norm reads it again."""
    return spec.attn is not None and not spec.parallel and (spec.ffn is not None or spec.attn.out != "none")


KEEP: dict[str, Kept] = {
    "attn": Kept("o and lse", lambda spec: spec.attn is not None),
    "mid": Kept("input of the FFN half, or the sum before the first closing norm", _has_mid),
    "proj": Kept(
        "attention projection before its post-norm", lambda spec: spec.attn is not None and spec.attn.post != "none"
    ),
    "qkv": Kept("raw product of q, k, v and the output gate", lambda spec: spec.attn is not None),
    "gu": Kept("gate and up pre-activations", lambda spec: spec.ffn is not None),
    "out": Kept(
        "sum before the closing norm, or the down product before its post-norm",
        lambda spec: spec.ffn is not None and (spec.ffn.out != "none" or spec.ffn.post != "none"),
    ),
}
"""By name, in the order in which `block_fwd` returns them."""
KEEP_NAMES = tuple(KEEP)
KEEP_PRESETS: dict[str, tuple[str, ...]] = {
    "inputs": (),
    "mid": ("mid",),
    "attention": ("attn",),
    "attention+mid": ("attn", "mid"),
    "attention+mid+qkv": ("attn", "mid", "qkv"),
    "all but attention": ("mid", "gu", "out"),
    "all but ffn": ("attn", "mid", "proj", "qkv"),
    "all": KEEP_NAMES,
}

Keep = str | Iterable[str]


def keepable(spec: BlockFields) -> tuple[str, ...]:
    """The names of the values that this block can keep for backward, in canonical order."""
    return tuple(name for name, kept in KEEP.items() if kept.exists(spec))


def check_names(keep: Keep) -> None:
    """Raise `ValueError` unless `keep` is a preset or holds names that some block has."""
    if isinstance(keep, str):
        if keep not in KEEP_PRESETS:
            raise ValueError(
                f"keep: expected a preset ({', '.join(map(repr, KEEP_PRESETS))}) or a set of the names "
                f"{', '.join(KEEP_NAMES)}, got {keep!r}"
            )
        return
    for name in keep:
        if name not in KEEP_NAMES:
            raise ValueError(f"keep: expected names among {', '.join(KEEP_NAMES)}, got {name!r}")


def resolve_keep(spec: BlockFields, keep: Keep) -> tuple[str, ...]:
    """The canonical tuple of names for a preset's name or an iterable of names.

    A name in a preset that this block does not have (mid in a parallel block) is left out.
    **Raises** `ValueError` for an unknown preset or name, and for an explicit name that this block does
    not have; `TypeError` for anything else.
    """
    names = keepable(spec)
    if isinstance(keep, str):
        check_names(keep)
        return tuple(name for name in names if name in KEEP_PRESETS[keep])
    if not isinstance(keep, Iterable):
        raise TypeError(f"keep: expected a preset's name or an iterable of names, got {keep!r}")
    wanted = tuple(keep)
    for name in wanted:
        if name not in names:
            raise ValueError(f"keep: expected names among {', '.join(names)} (this block's), got {name!r}")
    return tuple(name for name in names if name in wanted)
