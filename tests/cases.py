"""The configurations that tests run: axes of a block's options, and a small set that covers every pair of values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ckptfused.spec import ACTIVATIONS, COEFFICIENTS, GATED_ACTIVATIONS, Adapter, AttentionSpec, BlockSpec, FFNSpec

# The first value of an axis is its default. Each default goes with every value of every other axis.
AXES: dict[str, tuple[object, ...]] = {
    "mask": (
        *("none", "causal", "keep4d", "drop2d", "add2d", "add4d"),
        *("pad-keep", "pad-drop", "pad-add", "causal+pad", "keep+pad", "packed", "packed-causal"),
    ),
    "act": ("swiglu", *(act for act in ACTIVATIONS if act != "swiglu" and act not in COEFFICIENTS)),
    "layout": ("pre", "post", "sandwich", "pre+out", "bare", "parallel", "shared", "attn", "ffn", "scaled"),
    "rope": ("none", "half", "interleaved", "half-partial", "interleaved-partial", "half-wide", "interleaved-batch"),
    "keep": ("inputs", "mid", "attention", "attention+mid", "attention+mid+qkv", "all"),
    "drop": ("0", "attn", "res", "hidden", "all"),
    "norm": ("layernorm", "layernorm-nobias", "rmsnorm", "gemma", "layernorm1p"),
    "qk_norm": ("none", "layernorm", "rmsnorm", "gemma"),
    "qk_place": ("head", "row", "turned"),
    "head_dim": (8, 20, 64, 7),
    "tokens": (67, 5, 150, 300),
    "heads": ("2/2", "4/2", "3/1"),
    "window": (0, 3, 70),
    "bias": ("none", "all", "qkv"),
    "width": (24, 40, 96),
    "hidden": (56, 37, 130),
    "batch": (1, 2, 3),
    "weights": ("separate", "joint", "interleaved"),
    "transposed": (False, True),
    "lora": ("none", "all", "drop", "twice", "float32"),
    "softcap": (0.0, 5.0),
    "sinks": (False, True),
    "gate": ("none", "entry", "head", "in-q"),
    "scale": (None, 0.2),
    "q_scale": ("none", "tokens", "batch"),
    "m": (1.0, 0.5),
    "seq_first": (False, True),
    "modulated": (False, True),
    "v_norm": ("none", "layernorm", "rmsnorm"),
}
# Instead of these values, for `Case.large`: more entries in every tensor, lengths odd and several tiles long.
LARGE: dict[str, dict[int, int]] = {
    "head_dim": {8: 64, 20: 72, 64: 128, 7: 65},
    "tokens": {67: 521, 5: 393, 150: 451, 300: 601},
    "width": {24: 128, 40: 201, 96: 264},
    "hidden": {56: 256, 37: 193, 130: 384},
}
DEFAULTS = {axis: values[0] for axis, values in AXES.items()}
ATTENTION_AXES = (
    "mask",
    "rope",
    "qk_norm",
    "qk_place",
    "head_dim",
    "heads",
    "window",
    "softcap",
    "sinks",
    "gate",
    "scale",
    "q_scale",
    "v_norm",
)

# Adapters of a half by the value of "lora"; `first` is the first product, `last` the half's closing one. With "float32"
# (and "twice") their tensors are float32 beside half-precision weights.
LORA: dict[str, Callable[[str, str, list[str]], list[Adapter]]] = {
    "none": lambda first, last, targets: [],
    "all": lambda first, last, targets: [Adapter(target, 3, 2.0) for target in targets],
    "drop": lambda first, last, targets: [Adapter(target, 5, 0.5, 0.3) for target in reversed(targets)],
    "twice": lambda first, last, targets: [
        *(Adapter(first, 4, 1.5), Adapter(last, 1, -1.0, 0.25), Adapter(first, 17, 0.75, 0.4), Adapter(last, 2, 3.0)),
    ],
    "float32": lambda first, last, targets: [Adapter(first, 8, 1.0), Adapter(last, 8, 1.0, 0.1)],
}

P = {"attn": 0.2, "res": 0.1, "hidden": 0.25}  # the dropout probabilities by site

Pair = tuple[tuple[str, object], tuple[str, object]]


# Without a residual: nothing but the products, a norm before them, norms and dropout after them too.
WITHOUT = ("", "normed-", "closed-")
NORMED, CLOSED = (("normed-mlp", "normed-heads"), ("closed-mlp", "closed-heads"))


@dataclass(frozen=True)
class Case:
    """One configuration: a value for every axis."""

    mask: str = "none"
    act: str = "swiglu"
    layout: str = "pre"
    rope: str = "none"
    keep: str = "inputs"
    drop: str = "0"
    norm: str = "layernorm"
    qk_norm: str = "none"
    qk_place: str = "head"
    head_dim: int = 8
    tokens: int = 67
    heads: str = "2/2"
    window: int = 0
    bias: str = "none"
    width: int = 24
    hidden: int = 56
    batch: int = 1
    weights: str = "separate"
    transposed: bool = False
    lora: str = "none"
    softcap: float = 0.0
    sinks: bool = False
    gate: str = "none"
    scale: float | None = None
    q_scale: str = "none"
    v_norm: str = "none"
    m: float = 1.0
    seq_first: bool = False
    modulated: bool = False
    scratch: int = 0
    """Scratch limit of the FFN. No axis: `TILED` crosses it with what matters to tiles. Nor are layouts of a half that
    has no residual, "mlp" and "heads": `WITHOUT_RESIDUAL`."""

    @property
    def id(self) -> str:
        """The values that differ from the defaults: a short text that states the whole configuration."""
        parts = []
        for axis, default in (DEFAULTS | {"scratch": 0}).items():
            value = getattr(self, axis)
            if value is True:
                parts.append(axis)
            elif value != default:
                parts.append(value if axis in ("act", "layout") else f"{axis}={value}")
        return ",".join(map(str, parts)) or "default"

    def large(self) -> Case:
        """The same in larger sizes; of cases that cover all pairs of values these do too."""
        return replace(self, **{axis: sizes[getattr(self, axis)] for axis, sizes in LARGE.items()})

    @property
    def packed(self) -> bool:
        return self.mask.startswith("packed")

    def p(self, site: str) -> float:
        return P[site] if self.drop in (site, "all") else 0.0

    def rotary_dim(self) -> int:
        """What `rope` turns: 0 (all of a head) or, partial, about half of it."""
        return self.head_dim // 4 * 2 if self.rope.endswith("partial") or self.head_dim % 2 else 0

    def mask_kinds(self) -> tuple[str, str]:
        """The spec's `mask` and `padding`."""
        mask = self.mask[:-2] if self.mask.endswith(("2d", "4d")) else "keep" if self.mask == "keep+pad" else "none"
        padding = self.mask.removeprefix("pad-") if self.mask.startswith("pad-") else "none"
        return mask, "drop" if self.mask.endswith("+pad") else padding

    def norms(self) -> dict[str, str]:
        """pre, post and out of a half."""
        kind = self.norm.removesuffix("-nobias")
        places = {
            "pre": ("pre", "sandwich", "pre+out", "parallel", "shared", "attn", "ffn", "scaled", *NORMED, *CLOSED),
            "post": ("sandwich", *CLOSED),
            "out": ("post", "pre+out", *CLOSED),
        }
        found = {place: kind if self.layout in layouts else "none" for place, layouts in places.items()}
        return {**found, "post": "layerscale"} if self.layout == "scaled" else found

    def adapters(self, targets: str) -> tuple[Adapter, ...]:
        """Adapters of a half that has these targets, its closing projection last."""
        names = targets.split()
        return tuple(LORA[self.lora](names[0], names[-1], names))

    def spec(self) -> BlockSpec:
        """The block's description as the library takes it."""
        heads, kv_heads = map(int, self.heads.split("/"))
        mask, padding = self.mask_kinds()
        qkv = "q k v" if self.weights == "separate" else "q"
        attn = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            **self.norms(),
            joint=self.weights != "separate",
            interleaved=self.weights == "interleaved",
            transposed=self.transposed,
            scale=self.scale,
            causal="causal" in self.mask,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            output_gate="entry" if self.gate == "in-q" else self.gate,
            gate_in_q=self.gate == "in-q",
            rope=self.rope.split("-")[0],
            rotary_dim=self.rotary_dim(),
            qk_norm=self.qk_norm,
            qk_place=self.qk_place,
            q_scale=self.q_scale != "none",
            v_norm=self.v_norm,
            p_attn=self.p("attn"),
            p_res=self.p("res"),
            m=self.m,
            residual=not self.layout.endswith("heads"),
            modulated=self.modulated,
            mask=mask,
            padding=padding,
            packed=self.packed,
            lora=self.adapters(" ".join((qkv, *(("gate",) if self.gate in ("entry", "head") else ()), "o"))),
        )
        gated = self.act in GATED_ACTIVATIONS
        first = "up" if not gated else "gate up" if self.weights == "separate" else "gate"
        ffn = FFNSpec(
            act=self.act,
            hidden=self.hidden,
            joint=self.weights != "separate" and gated,
            transposed=self.transposed,
            **self.norms(),
            p_hidden=self.p("hidden"),
            p_res=self.p("res"),
            m=self.m,
            residual=not self.layout.endswith("mlp"),
            modulated=self.modulated,
            lora=self.adapters(f"{first} down"),
        )
        if self.layout == "shared":
            ffn = replace(ffn, pre="none")
        return BlockSpec(
            attn=None if self.layout.endswith(("ffn", "mlp")) else attn,
            ffn=None if self.layout.endswith(("attn", "heads")) else ffn,
            parallel={"parallel": True, "shared": "shared"}.get(self.layout, False),
            seq_first=self.seq_first,
            scratch=self.scratch,
        ).with_keep(self.keep)


def _one_way(axis: str, value: object, other: str, other_value: object) -> bool:
    plain = other_value == DEFAULTS[other]
    match axis, value:
        case "layout", "ffn":
            return (other in ATTENTION_AXES and not plain) or (other, other_value) == ("drop", "attn")
        case "layout", "attn":
            return (other in ("act", "hidden") and not plain) or (other, other_value) == ("drop", "hidden")
        case "mask", "packed" | "packed-causal":
            return other in ("batch", "seq_first") and not plain
        case "weights", "interleaved":  # joint where there is no attention
            return (other, other_value) == ("layout", "ffn") or (other == "heads" and not plain)
        case "qk_place", "row":
            return (other, other_value) in (("weights", "interleaved"), ("gate", "in-q"))
        case "gate", "in-q":
            return other == "weights" and not plain
        case "modulated", True:
            return other == "seq_first" and not plain
        case "tokens", 300:
            return (other, other_value) == ("batch", 3)  # only to keep the suite short
    return False


def impossible(first: tuple[str, object], second: tuple[str, object]) -> bool:
    """Whether two axis values cannot stand in one configuration."""
    return _one_way(*first, *second) or _one_way(*second, *first)


@functools.cache
def all_pairs() -> tuple[Case, ...]:
    """A deterministic greedy covering array: every possible pair of values of two axes is in some case.

    **Source**: Cohen et al., "The AETG system" (1997), with ties broken by how rarely a value was used so far.
    """
    values = [(axis, value) for axis in AXES for value in AXES[axis]]
    open_pairs: set[Pair] = {
        (a, b) for a, b in itertools.combinations(values, 2) if a[0] != b[0] and not impossible(a, b)
    }
    order = {value: index for index, value in enumerate(values)}
    used = dict.fromkeys(values, 0)
    cases = []
    while open_pairs:
        row = list(min(open_pairs, key=lambda pair: (order[pair[0]], order[pair[1]])))
        for axis in AXES:
            if any(axis == name for name, _ in row):
                continue
            fits = [(axis, v) for v in AXES[axis] if not any(impossible((axis, v), chosen) for chosen in row)]

            new = [sum(not open_pairs.isdisjoint(((value, c), (c, value))) for c in row) for value in fits]
            best = max(range(len(fits)), key=lambda n: (new[n], -used[fits[n]]))
            row.append(fits[best])
        for value in row:
            used[value] += 1
        row.sort(key=order.__getitem__)
        open_pairs -= set(itertools.combinations(row, 2))
        cases.append(Case(**dict(row)))  # type: ignore[arg-type]
    return tuple(cases)


def with_coefficients() -> tuple[Case, ...]:
    """Every twelfth of the pairs that has an FFN, with an activation that has coefficients."""
    whole = [case for case in all_pairs() if case.spec().ffn is not None]
    return tuple(replace(case, act=act) for act in COEFFICIENTS for case in whole[::12])


def by_turns(*axes: Iterable[Any]) -> list[Any]:
    """The product of axes, for `parametrize`, of which `make test` has one value of the last axis by turns with all
    that the others have; `make test-all` has the rest. Where others are as long as the last, all pairs of values stay.
    """
    *others, last = map(list, axes)
    return [
        pytest.param(
            *(axis[n] for axis, n in zip(others, chosen, strict=True)),
            value,
            marks=() if sum(chosen) % len(last) == turn else pytest.mark.extended,
        )
        for chosen in itertools.product(*(range(len(axis)) for axis in others))
        for turn, value in enumerate(last)
    ]


# FFN halves just below and above the hidden-wide scratch (3 N F values gated, else 2 N F) from which on the backward
# goes in tiles: of columns where F is long, of rows where N is. Whole blocks, every sixth of the pairs, beside them.
LONG_F = Case(act="swiglu", layout="ffn", drop="hidden", width=24, hidden=1739, scratch=1 << 18)
LONG_N = replace(LONG_F, hidden=56)
TILED: tuple[tuple[Case, torch.dtype], ...] = (
    (replace(LONG_F, tokens=12), torch.float32),
    (replace(LONG_F, tokens=20), torch.float32),
    (replace(LONG_F, tokens=61), torch.bfloat16),
    (replace(LONG_F, act="gelu", tokens=45), torch.float32),
    (replace(LONG_N, tokens=380), torch.float32),
    (replace(LONG_N, tokens=450), torch.float32),
    (replace(LONG_N, tokens=1201), torch.bfloat16),
    (replace(LONG_N, act="gelu", tokens=1100), torch.float32),
    (replace(LONG_F, tokens=21, lora="twice", weights="joint"), torch.float32),
    (replace(LONG_N, tokens=700, lora="drop", bias="all"), torch.float32),
    *((replace(case, tokens=300, scratch=1), torch.float32) for case in all_pairs()[5::6] if case.layout != "attn"),
)
WITHOUT_RESIDUAL = tuple(
    replace(case, layout=WITHOUT[n % 3] + {"ffn": "mlp", "attn": "heads"}[case.layout])
    for n, case in enumerate((*all_pairs(), *(case for case, _ in TILED)))
    if case.layout in ("attn", "ffn")
)
"""Halves to whose result x is not added, as MLP and attention of a layer are by themselves."""
