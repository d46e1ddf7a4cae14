"""A block as data: `BlockSpec`, and the one cache of specs that were read from their texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .adapters import MOST_ADAPTERS, Adapter
from .fields import AttentionSpec, BlockFields, FFNSpec
from .keep import Keep, resolve_keep
from .table import check_rows, rows
from .text import fields_of, text_of

MOST_TEXTS = 1024
"""Texts remembered: a model has a handful, a schedule of dropout probabilities one a step."""


@dataclass(frozen=True)
class BlockSpec(BlockFields):
    """One or two halves, what is kept for backward, and the layout of x.

    `parallel=True` adds both halves to the same x; `"shared"` also feeds the attention half's pre-norm
    output to the FFN. `keep` takes what `resolve_keep` takes. `compute` is the type of the matrix
    products; None: the type of x.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    _text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.attn is not None and not isinstance(self.attn, AttentionSpec):
            raise TypeError(f"attn: expected an AttentionSpec or None, got {self.attn!r}")
        if self.ffn is not None and not isinstance(self.ffn, FFNSpec):
            raise TypeError(f"ffn: expected an FFNSpec or None, got {self.ffn!r}")
        if self.attn is None and self.ffn is None:
            raise ValueError("BlockSpec: expected an attention half, an FFN half or both, got neither")
        for name, half in self.halves.items():
            if not half.residual and len(self.halves) == 2:
                raise ValueError(f"{name}.residual: expected one half alone without one, got both halves")
            if half.modulated and self.seq_first:
                raise ValueError(f"{name}.modulated: expected batch-first x, got seq_first=True")
        if self.parallel is not False:
            if self.parallel is not True and self.parallel != "shared":
                raise ValueError(f"parallel: expected False, True or 'shared', got {self.parallel!r}")
            if self.attn is None or self.ffn is None:
                raise ValueError("parallel: expected a spec with both halves, got one half")
            if self.attn.out != "none" or self.ffn.out != "none":
                raise ValueError(
                    "parallel: expected no closing norm (out='none') in either half, got "
                    f"attn.out={self.attn.out!r}, ffn.out={self.ffn.out!r}"
                )
            if self.parallel == "shared" and self.ffn.pre != "none":
                raise ValueError(
                    "parallel='shared' feeds attn.pre's output to the FFN: expected ffn.pre='none', "
                    f"got {self.ffn.pre!r}"
                )
        check_rows(self)
        if self.seq_first and self.attn is not None and self.attn.packed:
            raise ValueError("attn.packed: expected batch-first x of shape [1, N, C], got seq_first=True")
        if len(self.adapters) > MOST_ADAPTERS:
            raise ValueError(f"lora: expected at most {MOST_ADAPTERS} adapters in a block, got {len(self.adapters)}")
        object.__setattr__(self, "keep", resolve_keep(self, self.keep))
        object.__setattr__(self, "_text", text_of(self))

    def to_string(self) -> str:
        """The text form that the ops take: `key=value` words, defaults left out, order fixed."""
        return self._text

    @classmethod
    def parse(cls, text: str) -> BlockSpec:
        """The spec of a text form, the inverse of `to_string`. **Raises** `ValueError` on unknown keys."""
        return parse(text)

    def with_keep(self, keep: Keep) -> BlockSpec:
        """The same block keeping something else: a preset's name or an iterable of names."""
        return dataclasses.replace(self, keep=resolve_keep(self, keep))

    def with_inputs(self, mask: str = "none", padding: str = "none", packed: bool = False) -> BlockSpec:
        """The same block called with these kinds of mask and padding, or with packed sequences."""
        if self.attn is None:
            if mask != "none" or padding != "none" or packed:
                raise ValueError("mask, padding, cu_seqlens: expected a spec with an attention half, got none")
            return self
        attn = dataclasses.replace(self.attn, mask=mask, padding=padding, packed=packed)
        return dataclasses.replace(self, attn=attn)

    def without_dropout(self) -> BlockSpec:
        """The same block in eval: every dropout probability 0."""

        def still(half: AttentionSpec | FFNSpec) -> tuple[Adapter, ...]:
            return tuple(dataclasses.replace(adapter, p=0.0) for adapter in half.lora)

        attn = self.attn and dataclasses.replace(self.attn, p_attn=0.0, p_res=0.0, lora=still(self.attn))
        ffn = self.ffn and dataclasses.replace(self.ffn, p_hidden=0.0, p_res=0.0, lora=still(self.ffn))
        return dataclasses.replace(self, attn=attn, ffn=ffn)

    @cached_property
    def has_dropout(self) -> bool:
        """Whether a call draws random numbers."""
        rates = [getattr(h, row.name) for h in self.halves.values() for row in rows(type(h)) if row.key.probability]
        return any(p > 0 for p in (*rates, *(adapter.p for adapter in self.adapters.values())))


@lru_cache(maxsize=MOST_TEXTS)
def parse(text: str, keep: Keep | None = None, inputs: tuple[str, str, bool] | None = None) -> BlockSpec:
    """The spec of a text form, remembered; keeping something else (hashable), or called with other inputs.

    `inputs`: the arguments of `with_inputs`. **Raises** `ValueError`.
    """
    spec = BlockSpec(**fields_of(text))
    if keep is not None:
        spec = spec.with_keep(keep)
    return spec if inputs is None else spec.with_inputs(*inputs)
