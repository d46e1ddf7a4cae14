"""What a block keeps for backward beside its input and 16 bytes of random state: names and presets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptfused.spec import BlockSpec

KEEP_NAMES = ("attn", "mid", "proj", "qkv", "gu", "out")
KEEP_PRESETS: dict[str, tuple[str, ...]] = {
    "inputs": (),
    "mid": ("mid",),
    "attention": ("attn",),
    "attention+mid": ("attn", "mid"),
    "attention+mid+qkv": ("attn", "mid", "qkv"),
    "all": KEEP_NAMES,
}

Keep = str | Iterable[str]


def keepable(spec: BlockSpec) -> tuple[str, ...]:
    """The names of the values that this block can keep for backward, in canonical order."""
    attn, ffn = spec.attn, spec.ffn
    exists = {
        "attn": attn is not None,
        # A half alone has a sum to keep only where a closing norm reads it again.
        "mid": attn is not None and not spec.parallel and (ffn is not None or attn.out != "none"),
        "proj": attn is not None and attn.post != "none",
        "qkv": attn is not None,
        "gu": ffn is not None,
        "out": ffn is not None and (ffn.out != "none" or ffn.post != "none"),
    }
    return tuple(name for name in KEEP_NAMES if exists[name])


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


def resolve_keep(spec: BlockSpec, keep: Keep) -> tuple[str, ...]:
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
