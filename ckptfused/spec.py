"""What a block computes, as data: typed specs, their text form, and the names of their tensors.

The C++ ops take the text form (`BlockSpec.to_string()`) and parse it once. A spec holds everything that
does not need a tensor: norm placements, head layout, mask kinds, dropout probabilities, what is kept for
backward. The tensors travel beside it, in the order of `param_names(spec)` and `AUX_NAMES`.
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptfused.adapters import MOST_ADAPTERS, Adapter, adapters_of, check_adapters
from ckptfused.checks import check_choice, check_integer, check_number, check_probability
from ckptfused.keep import KEEP_NAMES, KEEP_PRESETS, Keep, check_names, keepable, resolve_keep
from ckptfused.slots import AUX_NAMES, PARAM_SLOTS, param_names, param_shapes
from ckptfused.spec_text import parse_half, parse_value, words_of

__all__ = [
    *("AttentionSpec", "FFNSpec", "BlockSpec", "Adapter"),
    *("NORMS", "ROPES", "MASK_KINDS", "ACTIVATIONS", "GATED_ACTIVATIONS", "COMPUTE_TYPES"),
    "MAX_HEAD_DIM",
    *("KEEP_NAMES", "KEEP_PRESETS", "Keep", "keepable", "resolve_keep"),
    *("PARAM_SLOTS", "AUX_NAMES", "param_names", "param_shapes"),
    *("check_names", "check_probability"),
]

MAX_HEAD_DIM = 256
NORMS = ("none", "layernorm", "rmsnorm", "gemma")
ROPES = ("none", "half", "interleaved")
MASK_KINDS = ("none", "keep", "drop", "add")
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2", *GATED_ACTIVATIONS)
COMPUTE_TYPES = ("float64", "float32", "bfloat16", "float16")


def _check_common(half: AttentionSpec | FFNSpec, name: str) -> None:
    """Checks of the fields that both halves have; whole numbers become floats where a float is meant."""
    for key in ("pre", "post", "out"):
        check_choice(f"{name}.{key}", getattr(half, key), NORMS)
    for f in dataclasses.fields(half):
        value = getattr(half, f.name)
        if f.type == "bool" and not isinstance(value, bool):
            raise TypeError(f"{name}.{f.name}: expected a bool, got {value!r}")
        if f.name.startswith("p_"):
            check_probability(f"{name}.{f.name}", value)
        if f.name.endswith("_eps"):
            check_number(f"{name}.{f.name}", value)
            if value < 0:
                raise ValueError(f"{name}.{f.name}: expected a number of at least 0, got {value!r}")
        if f.type == "int":  # NumPy's numbers would not read back from the text
            object.__setattr__(half, f.name, check_integer(f"{name}.{f.name}", value, 0))
        if f.type.startswith("float") and isinstance(value, numbers.Real) and not isinstance(value, bool):
            object.__setattr__(half, f.name, float(value))
    check_number(f"{name}.m", half.m)


@dataclass(frozen=True)
class AttentionSpec:
    """The attention half: `out_norm?(x + m * drop(post_norm?(attention(pre_norm?(x)))))`.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    heads: int
    kv_heads: int
    head_dim: int
    pre: str = "none"
    post: str = "none"
    out: str = "none"
    pre_eps: float = 1e-5
    post_eps: float = 1e-5
    out_eps: float = 1e-5
    joint: bool = False
    """One tensor [(H+2G)·D, C] holds the query, key and value weights (slot `q_w`; its bias in `q_b`)."""
    interleaved: bool = False
    """Joint only: the rows of the weight are [H, 3, D], for each head its query, key and value rows (GPT-NeoX)."""
    transposed: bool = False
    """Weights are stored [in, out] (GPT-2's Conv1D) rather than [out, in]."""
    scale: float | None = None
    """Factor of the logits; None: 1/sqrt(head_dim)."""
    causal: bool = False
    window: int = 0
    """Key j is visible to query i iff i - j < window (and j - i < window when not causal); 0: no window."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0: as they are."""
    rope: str = "none"
    rotary_dim: int = 0
    """RoPE turns the first rotary_dim entries of a head; 0: the whole head."""
    qk_norm: str = "none"
    qk_eps: float = 1e-5
    p_attn: float = 0.0
    p_res: float = 0.0
    m: float = 1.0
    mask: str = "none"
    padding: str = "none"
    packed: bool = False
    lora: tuple[Adapter, ...] = ()
    """Adapters beside q, k, v and o, in the order in which they are added; of a joint tensor beside q."""

    def __post_init__(self) -> None:
        for key in ("heads", "kv_heads", "head_dim"):
            check_integer(f"attn.{key}", getattr(self, key), 1)
        _check_common(self, "attn")
        if self.heads % self.kv_heads:
            raise ValueError(f"attn.kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if self.interleaved and not self.joint:
            raise ValueError("attn.interleaved: expected one tensor for q, k and v (joint=True), got joint=False")
        if self.interleaved and self.heads != self.kv_heads:
            raise ValueError(f"attn.interleaved: expected kv_heads={self.heads}, as heads, got {self.kv_heads}")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"attn.head_dim: expected at most {MAX_HEAD_DIM}, got {self.head_dim}")
        check_choice("attn.rope", self.rope, ROPES)
        check_choice("attn.qk_norm", self.qk_norm, NORMS)
        check_choice("attn.mask", self.mask, MASK_KINDS)
        check_choice("attn.padding", self.padding, MASK_KINDS)
        check_integer("attn.window", self.window, 0)
        check_integer("attn.rotary_dim", self.rotary_dim, 0)
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"attn.rotary_dim: expected at most head_dim={self.head_dim}, got {self.rotary_dim}")
        if self.rope != "none" and self.rotary % 2:
            raise ValueError(f"attn.rotary_dim: expected an even number, got {self.rotary}")
        if self.scale is not None:
            check_number("attn.scale", self.scale)
            if self.scale == 0:
                raise ValueError("attn.scale: expected a number other than 0 (None: 1/sqrt(head_dim)), got 0.0")
        check_number("attn.softcap", self.softcap)
        if self.softcap < 0:
            raise ValueError(f"attn.softcap: expected a number of at least 0, got {self.softcap!r}")
        if self.packed and (self.mask != "none" or self.padding != "none"):
            raise ValueError(
                "attn.packed: packed sequences take no mask and no padding, "
                f"got mask={self.mask!r}, padding={self.padding!r}"
            )
        check_adapters("attn", self, ("q", "o") if self.joint else ("q", "k", "v", "o"))

    @property
    def rotary(self) -> int:
        """How many entries of a head RoPE turns."""
        return self.rotary_dim or self.head_dim

    @property
    def q_width(self) -> int:
        """H·D, the width of the queries and of the attention output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G·D, the width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """(H+2G)·D, the width of the joint product."""
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True)
class FFNSpec:
    """The FFN half: `out_norm?(x + m * drop(post_norm?(down(drop(act(...))))))`.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    act: str
    hidden: int
    joint: bool = False
    """Gated only: one tensor [2F, C] holds gate and up weights, gate rows first (slot `gate_w`)."""
    transposed: bool = False
    pre: str = "none"
    post: str = "none"
    out: str = "none"
    pre_eps: float = 1e-5
    post_eps: float = 1e-5
    out_eps: float = 1e-5
    p_hidden: float = 0.0
    p_res: float = 0.0
    m: float = 1.0
    lora: tuple[Adapter, ...] = ()
    """Adapters beside gate, up and down, in the order in which they are added; of a joint tensor beside gate."""

    def __post_init__(self) -> None:
        check_choice("ffn.act", self.act, ACTIVATIONS)
        check_integer("ffn.hidden", self.hidden, 1)
        _check_common(self, "ffn")
        if self.joint and not self.gated:
            raise ValueError(
                f"ffn.joint: expected a gated activation ({', '.join(GATED_ACTIVATIONS)}), got act={self.act!r}"
            )
        first = ("gate",) if self.joint else ("gate", "up") if self.gated else ("up",)
        check_adapters("ffn", self, (*first, "down"))

    @property
    def gated(self) -> bool:
        """Whether the hidden value is act(gate) * up."""
        return self.act in GATED_ACTIVATIONS

    @property
    def gu_width(self) -> int:
        """2F for a gated FFN, F otherwise: the width of what the kept name `gu` holds."""
        return 2 * self.hidden if self.gated else self.hidden


@dataclass(frozen=True)
class BlockSpec:
    """One or two halves, what is kept for backward, and the layout of x.

    `parallel=True` adds both halves to the same x; `"shared"` also feeds the attention half's pre-norm
    output to the FFN. `keep` takes what `resolve_keep` takes. `compute` is the type of the matrix
    products; None: the type of x.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    attn: AttentionSpec | None = None
    ffn: FFNSpec | None = None
    keep: tuple[str, ...] = ()
    parallel: bool | Literal["shared"] = False
    seq_first: bool = False
    compute: str | None = None
    _text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.attn is not None and not isinstance(self.attn, AttentionSpec):
            raise TypeError(f"attn: expected an AttentionSpec or None, got {self.attn!r}")
        if self.ffn is not None and not isinstance(self.ffn, FFNSpec):
            raise TypeError(f"ffn: expected an FFNSpec or None, got {self.ffn!r}")
        if self.attn is None and self.ffn is None:
            raise ValueError("BlockSpec: expected an attention half, an FFN half or both, got neither")
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
        if not isinstance(self.seq_first, bool):
            raise TypeError(f"seq_first: expected a bool, got {self.seq_first!r}")
        if self.seq_first and self.attn is not None and self.attn.packed:
            raise ValueError("attn.packed: expected batch-first x of shape [1, N, C], got seq_first=True")
        if self.compute is not None:
            check_choice("compute", self.compute, COMPUTE_TYPES)
        if len(adapters_of(self)) > MOST_ADAPTERS:
            raise ValueError(
                f"lora: expected at most {MOST_ADAPTERS} adapters in a block, got {len(adapters_of(self))}"
            )
        object.__setattr__(self, "keep", resolve_keep(self, self.keep))
        object.__setattr__(self, "_text", " ".join(words_of(self)))

    def to_string(self) -> str:
        """The text form that the ops take: `key=value` words, defaults left out, order fixed."""
        return self._text

    @classmethod
    def parse(cls, text: str) -> BlockSpec:
        """The spec of a text form, the inverse of `to_string`. **Raises** `ValueError` on unknown keys."""
        words: dict[str, str] = {}
        for word in text.split():
            key, sep, value = word.partition("=")
            if not sep or key in words:
                raise ValueError(f"spec: expected key=value words, each key once, got {word!r} in {text!r}")
            words[key] = value
        halves = words.pop("halves", "")
        if halves not in ("attn", "ffn", "attn+ffn"):
            raise ValueError(f"spec: expected halves=attn, ffn or attn+ffn, got {halves!r} in {text!r}")
        kinds: dict[str, type[AttentionSpec] | type[FFNSpec]] = {"attn": AttentionSpec, "ffn": FFNSpec}
        made: dict[str, Any] = {n: parse_half(kinds[n], n, words) for n in halves.split("+")}
        parallel = {"0": False, "1": True}.get(words.get("parallel", "0"), words.get("parallel"))
        keep = words.get("keep", "")
        spec = cls(
            **made,
            keep=tuple(keep.split("+")) if keep else (),
            parallel=parallel,  # type: ignore[arg-type]
            seq_first=parse_value("bool", "seq_first", words.get("seq_first", "0")),
            compute=words.get("compute"),
        )
        for key in words:
            if key not in ("keep", "parallel", "seq_first", "compute"):
                raise ValueError(f"spec: unknown key {key!r} in {text!r}")
        return spec

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

    @property
    def has_dropout(self) -> bool:
        """Whether a call draws random numbers."""
        halves = (self.attn, self.ffn)
        dropped = any(getattr(h, p, 0.0) > 0 for h in halves for p in ("p_attn", "p_hidden", "p_res"))
        return dropped or any(adapter.p > 0 for adapter in adapters_of(self).values())
