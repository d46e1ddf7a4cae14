"""Where the pieces of a layer are: what a family's adapter, or a module of ours, writes down at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ckptfused.masks import NO_MASK, Mask

NO_NAMES: dict[str, str] = {}
NO_VECTORS: dict[str, Tensor] = {}


def child(module: Any, name: str) -> Any:
    """A submodule, past `nn.Module.__getattr__`, which is a tenth of a call's host time in a tiny block."""
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


def weight(module: Any, name: str) -> Any:
    """A parameter, in the same way."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class Attention(NamedTuple):
    """The attention half of a layer: modules as they are found now, and numbers.

    `k` and `v` None: `q` holds the joint projection. Where no module of its own holds a projection's weight, a
    `pieces.Projection` stands in its place. Dropout probabilities are those of this call: 0 in eval.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q: Any
    k: nn.Module | None
    v: nn.Module | None
    o: nn.Module
    pre: nn.Module | None = None
    post: nn.Module | None = None
    out: nn.Module | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    rope: str = "none"
    rotary_dim: int = 0
    """0: as wide as the tables that the layer is called with."""
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    p_attn: float = 0.0
    p_res: float = 0.0
    m: float = 1.0
    interleaved: bool = False
    holders: tuple[nn.Module, ...] = ()
    """Modules whose own `forward` the fused one replaces: their code has to be the code that was read."""
    qk_place: str = "head"
    """What q_norm and k_norm are of, as `spec.QK_PLACES`."""
    sinks: Tensor | None = None
    """A logit for each head beside those of the keys, [heads]."""
    gate: Any = None
    """The projection whose sigmoid multiplies what attention makes; None: there is none, or it is in `q`."""
    output_gate: str = "none"
    """What it multiplies, as `spec.OUTPUT_GATES`."""
    residual: bool = True
    """Whether x is added."""
    modulated: bool = False
    """Whether a call gives the vectors of `pre` and `post`, a row for each batch element."""
    v_norm: nn.Module | None = None
    """The norm of each head of v, which has no weights."""


class FFN(NamedTuple):
    """The FFN half of a layer. `gate` None: not gated; gated with `up` None: `gate` holds both, gate rows first."""

    act: Any
    gate: nn.Module | None
    up: nn.Module | None
    down: nn.Module
    pre: nn.Module | None = None
    post: nn.Module | None = None
    out: nn.Module | None = None
    p_hidden: float = 0.0
    p_res: float = 0.0
    m: float = 1.0
    holders: tuple[nn.Module, ...] = ()
    hidden: int = 0
    """F, where the layer says it itself; 0: as wide as the input of `down`."""
    residual: bool = True
    """Whether x is added."""
    modulated: bool = False
    """Whether a call gives the vectors of `pre` and `post`, a row for each batch element."""


class Parts(NamedTuple):
    """A layer as halves; one of them may be missing."""

    attn: Attention | None = None
    ffn: FFN | None = None
    parallel: bool | Literal["shared"] = False
    width: int = 0
    """C, where the layer says it itself; 0: as wide as the result of the last projection."""
    names: Mapping[str, str] = NO_NAMES
    """By which the user knows the pieces: `"attn.o"` to `"self_attn.out_proj"`; a slot (`"attn.q_w"`) whose tensor is
    not the `weight` or `bias` of a piece has a name of its own.
    """


class Inputs(NamedTuple):
    """What a layer was called with, in the block's terms. **Shapes** x [B, T, C], as `functional.block`."""

    x: Tensor
    masks: Mask = NO_MASK
    cos: Tensor | None = None
    sin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    own_tables: bool = False
    """cos and sin are the layer's own, made for an x of this length: they are not checked."""
    windowed: bool = True
    """Whether the layer's window applies at this call; a `mask` has its own."""
    seq_first: bool = False
    """x is [T, B, C]."""
    keep_keys: Callable[[Tensor, Tensor], object] | None = None
    """Takes the call's keys and values, where gradients are off: a key/value cache."""
    q_scale: Tensor | None = None
    """Factors of q by position, [T] or [B, T]."""
    vectors: Mapping[str, Tensor] = NO_VECTORS
    """Vectors of modulated halves, [B, C], and an activation's coefficients, by their slots: `"attn.pre_w"`, …"""

    def savable(self) -> Inputs:
        """The same with copies of what was made in inference mode (a mask that a model keeps, say), which cannot be
        saved for backward."""
        copied = self._replace(masks=Mask(*map(_savable, self.masks)))
        return Inputs(*map(_savable, copied))


def _savable(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


class Reason(NamedTuple):
    """Why a call is not fused. `original`: the layer's own forward runs, uncheckpointed, as without ckptfused."""

    text: str
    original: bool = False
    error: type[Exception] | None = None
    """What a module of ours raises, whose own forward would fail as well; a converted layer is left to its own."""
