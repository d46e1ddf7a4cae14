"""The normal form as data that outlives its recording: where a layer's pieces are, by name, and what a call gives."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.eager.activation import FUNCTIONS
from ckptfused.layer.parts import FFN, Attention, Inputs, Parts, Reason
from ckptfused.layer.projections import Norm, Projection, projection
from ckptfused.layer.quantized import is_quantized
from ckptfused.masks import NO_MASK, Mask
from ckptfused.models.derive.read import Form
from ckptfused.models.derive.recording.evaluate import joined_masks, once
from ckptfused.models.derive.recording.record import Recording
from ckptfused.models.derive.recording.recorder import Recorded
from ckptfused.models.derive.rules.coefficients import Coefficients
from ckptfused.models.derive.rules.core import Core, Outer
from ckptfused.models.derive.rules.mask_forms import in_rows
from ckptfused.models.derive.rules.modulation import Bias, Factor, Modulated, biases, factors, modulated
from ckptfused.models.derive.rules.pieces import Linear, NormPiece
from ckptfused.models.derive.rules.products import by_heads, token_by_token
from ckptfused.models.derive.rules.rotations import table_of
from ckptfused.models.derive.walk import Walk
from ckptfused.spec import GATED_ACTIVATIONS


class Map(NamedTuple):
    """A projection by the names of its tensors; rows, columns: the first and the number of those that are meant; None:
    all."""

    weight: str
    bias: str
    transposed: bool
    rows: tuple[int, int] | None = None
    module: str = ""
    """The module in whose forward it is computed."""
    columns: tuple[int, int] | None = None


class NormOf(NamedTuple):
    """A norm by the names of its tensors."""

    kind: str
    eps: float | None
    weight: str
    bias: str


class DerivedHalf(NamedTuple):
    """A half as `layer.parts` has it, with names in the place of modules; numbers and dropout's calls beside."""

    maps: tuple[Map | None, ...]
    norms: tuple[NormOf | None, ...]
    numbers: tuple[Any, ...]
    """What else is said of it: counts, widths, factors, kinds, and the name of a head's sinks."""
    rates: tuple[float, float]
    """Dropout's rate on attention's probabilities or the hidden value, and on what the half adds."""
    dropouts: tuple[int, int]
    """The numbers of those calls in the recording, -1 without one."""
    residual: bool
    """Whether x is added."""
    modulated: bool
    """Whether the vectors of its first two norms are the call's."""


class DerivedLayer(NamedTuple):
    """A layer in normal form."""

    attn: DerivedHalf | None
    ffn: DerivedHalf | None
    parallel: bool | Literal["shared"]
    cos: Outer | None = None
    sin: Outer | None = None
    mask: Outer | None = None
    kind: str = "none"
    causal: bool = False
    padding: Outer | None = None
    padding_kind: str = "none"
    window: int = 0
    """How far back a query sees by the layer's own mask, at the length of the call; 0: all the way."""
    also: tuple[tuple[Outer, str], ...] = ()
    """Masks beside these, with their kinds: what `mask` and they say is made once and shared by all layers."""
    own_mask: tuple[int, int, str] = (-1, 0, "")
    """The mask by place that the layer makes itself: its call's number in the recording, its place among what that
    makes, and its kind."""
    q_scale: Outer | None = None
    """Factors of q by position."""
    seq_first: bool = False
    """Whether x is [T, B, C]."""
    vectors: tuple[Modulated | Factor | Bias | Coefficients, ...] = ()
    """What a call gives: vectors of each batch element to norms, biases, coefficients to an activation."""

    def parts(self, layer: nn.Module) -> Parts:
        """The pieces of a layer, as they are now."""
        attn = None if self.attn is None else _attention(layer, self.attn, self.window)
        ffn = None if self.ffn is None else _ffn(layer, self.ffn)
        return Parts(attn, ffn, self.parallel)

    def inputs(self, x: Tensor, outer: dict[str, Tensor]) -> Inputs:
        """A call in the block's terms. outer: what stands outside, by the names of a recording."""
        masks, (batch, tokens) = NO_MASK, x.shape[1::-1] if self.seq_first else x.shape[:2]
        if self.mask is not None:
            mask, kind = in_rows(outer[self.mask.name], self.mask.form, batch), self.kind
            if self.also:
                mask, kind = self._joined(x.dtype, batch, outer), "add"
            padding = None if self.padding is None else outer[self.padding.name]
            masks = Mask(mask, kind, padding, self.padding_kind, self.causal)
        elif self.causal:
            masks = Mask(causal=True)
        cos, sin = (None if t is None else table_of(outer[t.name], t.form, tokens) for t in (self.cos, self.sin))
        vectors = dict(found for one in self.vectors for found in one.slots(outer, x))
        q_scale = None if self.q_scale is None else outer[self.q_scale.name].squeeze()
        return Inputs(x, masks, cos, sin, seq_first=self.seq_first, q_scale=q_scale, vectors=vectors)

    def _joined(self, dtype: torch.dtype, batch: int, outer: dict[str, Tensor]) -> Tensor:
        """All masks as one that is added."""
        given = ((self.mask, self.kind), *self.also)
        of = tuple(outer[t.name] for t, _ in given if t is not None)

        def made() -> Tensor:
            arranged = (in_rows(outer[t.name], t.form, batch) for t, _ in given if t is not None)
            return joined_masks(zip(arranged, (kind for _, kind in given), strict=True), dtype)

        return once(of, (given, dtype, batch), made)

    def masks(self, recording: Recording) -> dict[int, Tensor]:
        """The keep masks that a recording drew, by site."""
        sites = (*(self.attn.dropouts if self.attn else (-1, -1)), *(self.ffn.dropouts if self.ffn else (-1, -1)))
        rows = recording.x.shape[:2]
        drawn = {site: recording.calls[n].mask for site, n in enumerate(sites) if n >= 0}
        return {site: token_by_token(m, rows) if site else by_heads(m, rows[0]) for site, m in drawn.items()}  # type: ignore[misc, arg-type]

    @property
    def outer(self) -> tuple[Outer, ...]:
        """What it takes from outside beside x."""
        found = (self.cos, self.sin, self.q_scale, self.mask, self.padding, *(t for t, _ in self.also))
        found += tuple(t for one in self.vectors for t in one.made_of)
        return tuple(t for t in found if t is not None)


def layout_of(form: Form, walk: Walk, layer: nn.Module) -> DerivedLayer:
    """A form without its recording."""
    rate = lambda call, i, name: 0.0 if call is None else float(call.given(i, name, 0.5))  # noqa: E731
    attn = ffn = None
    found = DerivedLayer(None, None, form.parallel)
    if (branch := form.attn) is not None:
        core, heads = branch.core, branch.heads
        assert core is not None and heads is not None
        dropped = core.dropout
        p = 0.0 if dropped is None else rate(dropped, *((4, "dropout_p") if "scaled" in dropped.op else (1, "p")))
        by_call = tuple(modulated("attn", branch.pre, branch.post))
        numbers = (
            *(heads.heads, heads.kv_heads, heads.head_dim, heads.rope, heads.rotary_dim),
            *(
                _scale(core.scale * heads.factor, heads.head_dim),
                core.softcap,
                branch.m,
                heads.interleaved,
                heads.place,
                core.sinks,
                "none" if (gate := branch.gate) is None else gate.kind,
            ),
        )
        gated_by = None if gate is None or gate.in_q else gate.made
        sides = {"q": heads.q, "k": heads.k, "v": heads.v, "o": branch.last, "gate": gated_by}
        found = found._replace(vectors=(*by_call, *factors("attn", branch.post), *biases("attn", sides)))
        attn = DerivedHalf(
            tuple(map(_map, (heads.q, heads.k, heads.v, branch.last, gated_by))),
            tuple(map(_norm, (branch.pre, branch.post, form.attn_out, heads.q_norm, heads.k_norm, heads.v_norm))),
            numbers,
            (p, rate(branch.dropped, 1, "p")),
            _numbers(dropped, branch.dropped),
            branch.residual,
            bool(by_call),
        )
        found = found._replace(cos=heads.cos, sin=heads.sin, q_scale=heads.q_scale, mask=core.mask, kind=core.kind)
        found = found._replace(causal=core.causal, window=core.window, also=core.also, own_mask=_own_mask(core))
        found = found._replace(padding=core.padding, padding_kind=core.padding_kind)
    if (branch := form.ffn) is not None:
        made = branch.hidden
        assert made is not None
        by_call = tuple(modulated("ffn", branch.pre, branch.post))
        of_act = () if made.coefficients is None else (made.coefficients,)
        gated = made.up is not None or made.act in GATED_ACTIVATIONS
        first, second = (made.first, made.up) if gated else (None, made.first)
        beside: Any = (*factors("ffn", branch.post), *biases("ffn", {"gate": first, "up": second, "down": branch.last}))
        found = found._replace(vectors=(*found.vectors, *by_call, *beside, *of_act))
        ffn = DerivedHalf(
            tuple(map(_map, (first, second, branch.last))),
            tuple(map(_norm, (branch.pre, branch.post, form.ffn_out))),
            (made.act, branch.m),
            (rate(branch.hidden_dropped, 1, "p"), rate(branch.dropped, 1, "p")),
            _numbers(branch.hidden_dropped, branch.dropped),
            branch.residual,
            bool(by_call),
        )
    return found._replace(attn=attn, ffn=ffn)


def _own_mask(core: Core) -> tuple[int, int, str]:
    if core.constant is None:
        return -1, 0, ""
    assert core.constant.call is not None
    return core.constant.call.number, core.constant.index, core.constant_kind


def _scale(scale: float, head_dim: int) -> float | None:
    return None if abs(scale * head_dim**0.5 - 1) < 1e-9 else scale


def _numbers(*calls: Recorded | None) -> Any:
    return tuple(-1 if call is None else call.number for call in calls)


def _map(made: Linear | None) -> Map | None:
    bias = "" if made is None or made.bias.startswith("call:") else made.bias
    return None if made is None else Map(made.weight, bias, made.transposed, made.rows, made.module, made.columns)


def _norm(found: NormPiece | None) -> NormOf | None:
    return None if found is None else NormOf(found.kind, found.eps, found.weight, found.bias)


def _tensor(layer: nn.Module, name: str) -> Tensor | None:
    if not name:
        return None
    module, _, last = name.rpartition(".")
    found: Tensor = getattr(layer.get_submodule(module), last)
    return found.squeeze(-1) if found.dim() == 3 else found  # of a convolution of one place


def _projected(layer: nn.Module, found: Map | None) -> Any:
    """The module of a projection that PEFT wraps, or whose weight is in few bits, for `layer.projections`; of any other
    its tensors.
    """
    if found is None:
        return None
    module, owner = layer.get_submodule(found.module), layer.get_submodule(found.weight.rpartition(".")[0])
    if _apart(module) or (owner is not module and _apart(owner)):
        what = "in few bits" if is_quantized(owner) else "with an adapter"
        if module is not owner or found.bias not in ("", f"{found.module}.bias"):
            return Reason(f"{found.weight}, {what}, is used past its module")
        whole = projection(module, found.module) if found.rows or found.columns else module
        if not isinstance(whole, Projection):
            return whole
        if whole.stored is not None:
            return Reason(f"{found.weight}, in few bits: parts of its product are taken")
    else:
        whole = Projection(_tensor(layer, found.weight), _tensor(layer, found.bias), found.transposed)  # type: ignore[arg-type]
    if found.rows is not None:
        whole = whole.rows(*found.rows)
    return whole if found.columns is None or isinstance(whole, Reason) else whole.columns(*found.columns)


def _apart(module: nn.Module) -> bool:
    """Whether a projection is more than a product with its weight."""
    return "base_layer" in module._modules or is_quantized(module)


def _normed(layer: nn.Module, found: NormOf | None) -> Any:
    if found is None:
        return None
    weight, bias = _tensor(layer, found.weight), _tensor(layer, found.bias)
    weight = weight if weight is None or weight.dim() == 1 else weight.flatten()  # LayerScale's may be [1, 1, C]
    return Norm(found.kind, found.eps, weight, bias)  # type: ignore[arg-type]


def _attention(layer: nn.Module, half: DerivedHalf, window: int) -> Attention:
    heads, kv_heads, head_dim, rope, rotary_dim, scale, softcap, m, interleaved, place, sinks, gate = half.numbers
    q, k, v, o, gated_by = (_projected(layer, found) for found in half.maps)
    pre, post, out, q_norm, k_norm, v_norm = (_normed(layer, found) for found in half.norms)
    return Attention(
        *(heads, kv_heads, head_dim, q, k, v, o, pre, post, out, q_norm, k_norm, rope, rotary_dim, scale),
        softcap=softcap or None,
        window=window or None,
        p_attn=half.rates[0],
        p_res=half.rates[1],
        m=m,
        interleaved=interleaved,
        qk_place=place,
        sinks=_tensor(layer, sinks),
        gate=gated_by,
        output_gate=gate,
        residual=half.residual,
        modulated=half.modulated,
        v_norm=v_norm,
    )


def _ffn(layer: nn.Module, half: DerivedHalf) -> FFN:
    act, m = half.numbers
    gate, up, down = (_projected(layer, found) for found in half.maps)
    pre, post, out = (_normed(layer, found) for found in half.norms)
    beside: Any = {"residual": half.residual, "modulated": half.modulated}
    return FFN(FUNCTIONS[act], gate, up, down, pre, post, out, half.rates[0], half.rates[1], m, **beside)
