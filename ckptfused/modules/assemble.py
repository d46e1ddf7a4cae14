"""From live layers to one op call: the words of the spec, and the parameters in slot order.

The state of the layers is read at every call, so `layer.dropout.p = 0.2` or `layer.norm_first = True` take
effect as they do in PyTorch. The words are put in canonical form once per distinct state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# As they are now: a subclass that somebody puts in their place in torch.nn may compute something else.
from torch.nn import Dropout, Linear, MultiheadAttention
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ckptfused.functional import (
    check_devices,
    check_dtype,
    check_input,
    check_packed,
    check_param,
    rotary_view,
    run,
)
from ckptfused.key_values import run_with_keys
from ckptfused.masks import NO_MASK, Mask, encoder_mask
from ckptfused.modules.activations import Activation, activation_kind
from ckptfused.modules.attention_layer import GroupedAttention
from ckptfused.modules.norms import norm_eps, norm_kind
from ckptfused.modules.sdpa import sdpa_replaced
from ckptfused.spec import GATED_ACTIVATIONS, MAX_HEAD_DIM, parse

Slots = list[Tensor | None]


class Call(NamedTuple):
    """The arguments of one block op, checked."""

    op: str
    x: Tensor
    slots: Slots
    text: str
    masks: Mask = NO_MASK
    cos: Tensor | None = None
    sin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    keep_keys: Callable[[Tensor, Tensor], object] | None = None
    """Takes the call's keys and values, where gradients are off: a key/value cache."""

    def run(self, generator: torch.Generator | None = None) -> Tensor:
        """The block's output."""
        given = self.op, self.x, self.slots, self.text, self.masks, self.cos, self.sin, self.cu_seqlens, generator
        if self.keep_keys is None or torch.is_grad_enabled():
            return run(*given)
        y, k, v = run_with_keys(*given)
        self.keep_keys(k, v)
        return y


def keep_text(keep: Any) -> str:
    """A preset's name as it is; explicit names as `"=attn+mid"`. **Raises** `TypeError` for anything else."""
    if isinstance(keep, str):
        return keep
    try:
        return "=" + "+".join(keep)
    except TypeError as error:
        raise TypeError(f"keep: expected a preset's name or an iterable of names, got {keep!r}") from error


def keeps_inputs_alone(keep: str) -> bool:
    """Whether a `keep`, as `keep_text` gives it, is nothing beside the inputs of its ops."""
    return keep in ("inputs", "=")


@torch.compiler.assume_constant_result
def canonical_text(words: str, keep: str) -> str:
    """The spec's text for words in any order. From text to text, so that torch.compile can fold it."""
    names = tuple(filter(None, keep[1:].split("+"))) if keep.startswith("=") else keep
    return parse(words, names).to_string()


def settled(number: float | None) -> Any:
    """A number as torch.compile's constant: it would otherwise trace a changed float as a symbol."""
    if number is not None and torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return guard_scalar(number)
    return number


def hooked(*layers: nn.Module | None) -> bool:
    """Whether somebody watches or patches the inner layers, which a fused block does not call."""
    return any(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
        for layer in layers
        if layer is not None
    )


def _rate(layer: Any) -> Any:
    return settled(layer.p) if layer.training else 0.0


def _norm_words(half: str, place: str, norm: Any, width: int, x: Tensor) -> str:
    if norm is None:
        return ""
    return f" {half}.{place}={norm_kind(norm, width)} {half}.{place}_eps={settled(norm_eps(norm, x))}"


def attention_words(attn: Any, norm: Any, place: str, dropout: nn.Module, x: Tensor) -> str:
    """The words of an attention half, inputs left out."""
    p = settled(attn.dropout) if attn.training else 0.0
    words = (
        f" attn.heads={attn.num_heads} attn.kv_heads={getattr(attn, 'num_kv_heads', attn.num_heads)}"
        f" attn.head_dim={attn.head_dim} attn.joint=1 attn.p_attn={p} attn.p_res={_rate(dropout)}"
    ) + _norm_words("attn", place, norm, attn.embed_dim, x)
    if type(attn) is not GroupedAttention:
        return words
    if attn.q_norm is not None:
        kind = norm_kind(attn.q_norm, attn.head_dim)
        words += f" attn.qk_norm={kind} attn.qk_eps={settled(norm_eps(attn.q_norm, x))}"
    if attn.rotary is not None:
        dim = attn.rotary.dim
        words += f" attn.rope={attn.rope_style} attn.rotary_dim={0 if dim == attn.head_dim else dim}"
    if attn.scale is not None:
        words += f" attn.scale={settled(attn.scale)}"
    if attn.softcap:
        words += f" attn.softcap={settled(attn.softcap)}"
    return f"{words} attn.window={attn.window or 0}"


def input_words(masks: Mask, packed: bool) -> str:
    """The words that say what an attention half is called with."""
    return (
        f" attn.mask={masks.kind} attn.padding={masks.padding_kind} attn.causal={int(masks.causal)}"
        f" attn.packed={int(packed)}"
    )


def ffn_words(
    linear2: Any, activation: Activation, norm: Any, place: str, dropout: nn.Module, dropout2: nn.Module, x: Tensor
) -> str:
    """The words of an FFN half."""
    kind = activation_kind(activation)
    return (
        f" ffn.act={kind} ffn.hidden={linear2.in_features} ffn.joint={int(kind in GATED_ACTIVATIONS)}"
        f" ffn.p_hidden={_rate(dropout)} ffn.p_res={_rate(dropout2)}"
    ) + _norm_words("ffn", place, norm, linear2.out_features, x)


def _norm_slots(norm: Any, place: str) -> dict[str, Slots]:
    pair: Slots = [None, None] if norm is None else [norm.weight, getattr(norm, "bias", None)]
    return {"pre": pair if place == "pre" else [None, None], "out": pair if place == "out" else [None, None]}


def _check_norm(name: str, norm: Any, width: int, x: Tensor) -> None:
    for kind in ("weight", "bias"):
        value = getattr(norm, kind, None)
        if value is not None:
            check_param(f"{name}.{kind}", value, (width,), x)


def _check_linear(
    names: tuple[str, str], weight: Tensor, bias: Tensor | None, shape: tuple[int, int], x: Tensor
) -> None:
    check_param(names[0], weight, shape, x)
    check_dtype(names[0], weight, x)
    if bias is not None:
        check_param(names[1], bias, shape[:1], x)
        check_dtype(names[1], bias, x)


def attention_slots(attn: Any, norm: Any, place: str, x: Tensor) -> Slots:
    """The 18 tensors of an attention half, checked against x."""
    q_norm, k_norm = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
    width, rows = attn.embed_dim, attn.num_heads * attn.head_dim
    total = rows + 2 * getattr(attn, "num_kv_heads", attn.num_heads) * attn.head_dim
    names = ("self_attn.in_proj_weight", "self_attn.in_proj_bias")
    _check_linear(names, attn.in_proj_weight, attn.in_proj_bias, (total, width), x)
    names = ("self_attn.out_proj.weight", "self_attn.out_proj.bias")
    _check_linear(names, attn.out_proj.weight, attn.out_proj.bias, (width, rows), x)
    _check_norm("norm1", norm, width, x)
    _check_norm("self_attn.q_norm", q_norm, attn.head_dim, x)
    _check_norm("self_attn.k_norm", k_norm, attn.head_dim, x)
    norms = _norm_slots(norm, place)
    return [
        *norms["pre"],
        *(attn.in_proj_weight, attn.in_proj_bias, None, None, None, None),
        *_norm_slots(q_norm, "pre")["pre"],
        *_norm_slots(k_norm, "pre")["pre"],
        *(attn.out_proj.weight, attn.out_proj.bias, None, None),
        *norms["out"],
    ]


def ffn_slots(linear1: Any, linear2: Any, activation: Activation, norm: Any, place: str, x: Tensor) -> Slots:
    """The 12 tensors of an FFN half, checked against x, the width of which has been."""
    norms = _norm_slots(norm, place)
    first: Slots = [linear1.weight, linear1.bias]
    gated = activation_kind(activation) in GATED_ACTIVATIONS
    width, hidden = x.size(-1), linear2.in_features
    shape = (2 * hidden if gated else hidden, width)
    _check_linear(("linear1.weight", "linear1.bias"), linear1.weight, linear1.bias, shape, x)
    _check_linear(("linear2.weight", "linear2.bias"), linear2.weight, linear2.bias, (width, hidden), x)
    _check_norm("norm2", norm, width, x)
    return [
        *norms["pre"],
        *(first if gated else [None, None]),
        *([None, None] if gated else first),
        *(linear2.weight, linear2.bias, None, None),
        *norms["out"],
    ]


def _watched(**layers: nn.Module | None) -> str | None:
    """Which of the named layers somebody watches or patches."""
    return next((f"{name} has a hook or a forward of its own" for name, layer in layers.items() if hooked(layer)), None)


def _unknown(kinds: tuple[type, ...], **layers: Any) -> str | None:
    """Which of the named layers is of another class than these, the code of which the kernels stand in for."""
    for name, layer in layers.items():
        if type(layer) not in kinds:
            return f"{name} is a {type(layer).__module__}.{type(layer).__name__}, not PyTorch's {kinds[0].__name__}"
    return None


def _unknown_norm(name: str, norm: nn.Module | None, width: int) -> str | None:
    if norm_kind(norm, width) is not None:
        return None
    return f"{name} is a {type(norm).__name__} that the kernels do not compute over {width} values"


def attention_reason(attn: Any, norm: Any, dropout: nn.Module) -> str | None:
    """Why the kernels do not compute what these layers do; None if they do."""
    why = (
        _unknown((MultiheadAttention, GroupedAttention), self_attn=attn)
        or _unknown((Dropout,), dropout1=dropout)
        or _watched(self_attn=attn, norm1=norm, dropout1=dropout)
        or _watched(**{"self_attn.out_proj": attn.out_proj})
        or _unknown((Linear, NonDynamicallyQuantizableLinear), **{"self_attn.out_proj": attn.out_proj})
        or _unknown_norm("norm1", norm, attn.embed_dim)
    )
    if why is None and attn.head_dim > MAX_HEAD_DIM:
        why = f"heads are {attn.head_dim} wide, kernels reach {MAX_HEAD_DIM}"
    if why is None and sdpa_replaced():
        why = "F.scaled_dot_product_attention is not PyTorch's own, or a TorchFunctionMode may replace it"
    if why is None and not (attn._qkv_same_embed_dim and attn.bias_k is None and not attn.add_zero_attn):
        why = "self_attn has keys and values of another width, bias_k or add_zero_attn"
    return _variant_reason(attn) if why is None and type(attn) is GroupedAttention else why


def _variant_reason(attn: GroupedAttention) -> str | None:
    """As `attention_reason`, for what a `GroupedAttention` has beside."""
    q, k = attn.q_norm, attn.k_norm
    if type(q) is not type(k):
        return f"self_attn.q_norm is a {type(q).__name__}, k_norm a {type(k).__name__}"
    named = {"self_attn.q_norm": q, "self_attn.k_norm": k, "self_attn.rotary": attn.rotary}
    return _watched(**named) or _unknown_norm("self_attn.q_norm", q, attn.head_dim)


def ffn_reason(
    linear1: Any, linear2: Any, activation: Activation, norm: Any, dropout: nn.Module, dropout2: nn.Module
) -> str | None:
    """Why the kernels do not compute what these layers do; None if they do."""
    why = (
        _unknown((Linear,), linear1=linear1, linear2=linear2)
        or _unknown((Dropout,), dropout=dropout, dropout2=dropout2)
        or _watched(linear1=linear1, linear2=linear2, norm2=norm, dropout=dropout, dropout2=dropout2)
        or _unknown_norm("norm2", norm, linear2.out_features)
    )
    if why is None and activation_kind(activation) is None:
        why = f"activation {getattr(activation, '__name__', type(activation).__name__)} has no kernel"
    if why is None and isinstance(activation, nn.Module):
        why = _watched(activation=activation)
    return why


class AttentionInputs(NamedTuple):
    """What an attention half is called with beside x, normalised."""

    x: Tensor
    masks: Mask
    cos: Tensor | None
    sin: Tensor | None


def attention_inputs(
    attn: Any,
    x: Tensor,
    src_mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool,
    cu_seqlens: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> AttentionInputs:
    """Checks and normalises x (made 3-d), masks and rotary tables."""
    check_input(x, attn.embed_dim, "src")
    time, batch = (1, 0) if attn.batch_first else (0, 1)
    x = x.unsqueeze(batch) if x.dim() == 2 else x
    B, T = x.size(batch), x.size(time)
    check_devices(x, src_mask=src_mask, src_key_padding_mask=src_key_padding_mask, cu_seqlens=cu_seqlens)
    masks = encoder_mask(src_mask, src_key_padding_mask, is_causal, B, attn.num_heads, T)
    if getattr(attn, "causal", False):
        masks = masks._replace(causal=True)
    if cu_seqlens is not None:
        if not attn.batch_first:
            raise ValueError("cu_seqlens: expected a batch_first=True module, got batch_first=False")
        check_packed(x, cu_seqlens, masks)
    table = getattr(attn, "rotary", None)
    if table is None:
        if rotary is not None:
            raise ValueError("rotary: expected None in a module without rope, got a pair of tables")
        return AttentionInputs(x, masks, None, None)
    if rotary is not None:
        check_devices(x, cos=rotary[0], sin=rotary[1])
        cos, sin = (rotary_view(name, t, B, T, table.dim) for name, t in zip(("cos", "sin"), rotary, strict=True))
    else:
        cos, sin = table(T, x) if cu_seqlens is None else table.packed(cu_seqlens, T, x)
    return AttentionInputs(x, masks, cos, sin)
