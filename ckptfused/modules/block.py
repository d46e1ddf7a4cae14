"""A transformer block that saves its input and rebuilds the rest in backward."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import LayerNorm, TransformerEncoderLayer

from ckptfused.compat.torch_modules import ENCODER_HALVES
from ckptfused.layer import encoder
from ckptfused.layer.activations import Activation, activation_kind, coefficients_of, plain_activation
from ckptfused.layer.norms import make_norm
from ckptfused.layer.parts import Inputs, Parts, Reason, child
from ckptfused.layer.peft import adapted
from ckptfused.layer.projections import Norm
from ckptfused.layer.source import is_replaced
from ckptfused.modules.attention import attention_parts
from ckptfused.modules.ffn import ffn_parts
from ckptfused.modules.fused import FusedModule, rates, refuse_generic, run_module
from ckptfused.modules.grouped_attention import has_fast_path, make_attention
from ckptfused.modules.inputs import attention_inputs, check_modulated, check_modulation, vectors_of
from ckptfused.spec import GATED_ACTIVATIONS, Keep
from ckptfused.spec.checks import check_flag, check_integer

# PyTorch's own class is the one of this import: torch.nn's name for it is where somebody may put the block.
_GATE: Any = Norm("layerscale")
"""In a modulated block, of which a call gives the weight."""
_METHODS = {name: getattr(TransformerEncoderLayer, name) for name in ENCODER_HALVES}


class FusedCheckpointBlock(FusedModule, TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer`, its superset, with the memory of full activation checkpointing.

    The leading arguments, their defaults, the submodules, the `state_dict` keys and `forward` are those of
    `nn.TransformerEncoderLayer`: changing the class name in model code, or loading an old checkpoint, is all
    it takes. `is_causal=True` needs no mask beside it, and a fully masked row gives finite numbers.

    A mask's added value of -5e8 or less, in float16 its lowest (-65504), hides its key as -inf does. So the attention
    of a row of `torch.finfo(dtype).min` alone is 0, where PyTorch's is uniform; higher values are added, as in PyTorch.

    Beyond it, keyword-only (activation, too, takes more: one of `ckptfused.spec.ACTIVATIONS`; the `linear1` of a gated
    one is [2F, C], gate first, and "xielu" has two trained coefficients, `activation.alpha_p` and `alpha_n`):

    - num_kv_heads, head_dim: grouped-query attention; `self_attn.in_proj_weight` is then [(H+2G)·D, C].
    - norm: "layernorm", "rmsnorm" or "gemma". qk_norm: True or a kind of norm.
    - rope: True, a theta or a `RotaryTable`; rotary_dim, rope_style ("half", "interleaved").
    - causal: every call is. window, softcap, sinks, output_gate, scale: as in `AttentionSpec`.
    - attention_dropout, residual_dropout, ffn_dropout: override `dropout` at their sites.
    - parallel: True adds both halves to the same x, "shared" also gives both the output of `norm1`.
    - modulated: each call gives shift, scale and gate of both halves, `block(x, modulation=m)` (adaLN-Zero, DiT); the
      norms have no weights. Needs `norm_first` and `batch_first`.
    - keep: a preset or names (`ckptfused.spec.KEEP_PRESETS`).
    - scratch: bytes, an int or "64MiB", above which the FFN, and on a CPU the whole block by its queries, goes in
      tiles; None: 256 MiB on a CPU, 1.5 GiB on CUDA.

    PEFT's LoRA on `linear1`, `linear2` and `self_attn.out_proj` (`target_modules=["linear1", "linear2", "out_proj"]`)
    is part of the op: several adapters, their dropout, disabled or merged ones, and `modules_to_save`, as PEFT has it.
    PyTorch's own attention reads the weight of `out_proj` past an adapter, and its fast path in evaluation those of
    `linear1` and `linear2`: a block applies them always, and raises where a generic call of `nn.MultiheadAttention`
    would not. `self_attn` as a target turns a block generic: PEFT merges that adapter at each call (0.21 adds the part
    beside `out_proj` twice).

    Dropout decides in 16 bits: p below 2⁻¹⁷ (7.6e-6) drops nothing. `ckptfused.rng` says what resuming a run needs.

    A call is checkpointed generically, slower and as exact, where the kernels do not compute what the layers do: an
    activation, norm or layer of another kind, a hook or patch on an inner layer or its class, hooks on all modules, a
    `_sa_block` or `_ff_block` of the block's own, heads wider than 256, a mask that needs a gradient, a replaced
    `F.scaled_dot_product_attention`. A forward hook runs again in the replay, as under `torch.utils.checkpoint`.
    `repr` and `generic_reason()` say why; arguments that only the kernels take are refused then.

    **Shapes** src: [T, B, C], [B, T, C] with `batch_first`, or [T, C]; float64, float32, bfloat16, float16.
    **Saves** src (C values a token), what `keep` names, 16 bytes of random state in training with dropout.
    **Recomputes** QKV, attention, O and gate/up unless kept; down too in a post-norm block.
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came.
    **Source** Vaswani et al. 2017; Xiong et al. 2020 (arXiv 2002.04745), figure 1; `nn.TransformerEncoderLayer`.
    """

    parallel: bool | Literal["shared"] = False
    modulated: bool = False

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        norm: str = "layernorm",
        parallel: bool | Literal["shared"] = False,
        modulated: bool = False,
        attention_dropout: float | None = None,
        residual_dropout: float | None = None,
        ffn_dropout: float | None = None,
        keep: Keep = "inputs",
        scratch: int | str | None = None,
        **attention: Any,
    ) -> None:
        nn.Module.__init__(self)
        d_model, hidden = check_integer("d_model", d_model, 1), check_integer("dim_feedforward", dim_feedforward, 1)
        norm_first, bias = check_flag("norm_first", norm_first), check_flag("bias", bias)
        if parallel not in (False, True, "shared"):
            raise ValueError(f"parallel: expected False, True or 'shared', got {parallel!r}")
        p_attn, p_res, p_ffn = rates(
            dropout, attention_dropout=attention_dropout, residual_dropout=residual_dropout, ffn_dropout=ffn_dropout
        )
        if parallel and not norm_first:
            raise ValueError(f"parallel={parallel!r}: expected norm_first=True, got norm_first=False")
        if check_flag("modulated", modulated):
            check_modulated(parallel, norm_first, batch_first)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = plain_activation(activation, **factory)
        self.self_attn = make_attention(
            d_model, nhead, p_attn, bias, batch_first, device, dtype, norm=norm, **attention
        )
        gated = activation_kind(self.activation) in GATED_ACTIVATIONS
        self.linear1 = nn.Linear(d_model, hidden * (2 if gated else 1), bias=bias, **factory)
        self.dropout = nn.Dropout(p_ffn)
        self.linear2 = nn.Linear(hidden, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        self.parallel, self.modulated = parallel, modulated
        of_norms = (norm, d_model, layer_norm_eps, bias, device, dtype)
        self.norm1 = make_norm(*of_norms, affine=not modulated)
        self.norm2 = None if parallel == "shared" else make_norm(*of_norms, affine=not modulated)  # type: ignore[assignment]
        self.dropout1 = nn.Dropout(p_res)
        self.dropout2 = nn.Dropout(p_res)
        self.keep, self.scratch = keep, scratch

    @property
    def activation_relu_or_gelu(self) -> int:  # type: ignore[override]
        """What PyTorch's own fast path may take over (nested tensors) in the present state: 0 none, 1 relu, 2 gelu."""
        usual = has_fast_path(self.self_attn) and type(self.norm1) is LayerNorm
        usual = usual and not self.parallel and not self.modulated
        usual = usual and not (adapted(self.linear1) or adapted(self.linear2))  # it reads their weights past PEFT
        return {"relu": 1, "gelu": 2}.get(activation_kind(self.activation) or "", 0) if usual else 0

    @classmethod
    def llama(
        cls,
        d_model: int,
        nhead: int,
        dim_feedforward: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        rope_theta: float = 1e4,
        norm_eps: float = 1e-5,
        **options: Any,
    ) -> FusedCheckpointBlock:
        """The modern preset: pre-norm RMSNorm, SwiGLU, RoPE, causal, no bias, batch first; call `block(x)`.

        `dim_feedforward` None: 8/3 d_model, rounded up to a multiple of 256. `options` go to the constructor.

        **Source** Touvron et al. 2023 (arXiv 2302.13971), section 2.2.
        """
        width = check_integer("d_model", d_model, 1)
        hidden = -(-8 * width // (3 * 256)) * 256 if dim_feedforward is None else dim_feedforward
        preset: dict[str, Any] = {
            **{"activation": "swiglu", "norm": "rmsnorm", "layer_norm_eps": norm_eps, "bias": False},
            **{"batch_first": True, "norm_first": True, "causal": True, "rope": rope_theta},
            "num_kv_heads": num_kv_heads,
        }
        return cls(d_model, nhead, hidden, dropout, **{**preset, **options})

    @classmethod
    def from_layer(cls, layer: TransformerEncoderLayer, keep: Keep = "inputs") -> FusedCheckpointBlock:
        """Takes over a layer: the same `Parameter` objects, submodules, attributes, hooks and training flag.

        **Raises** `TypeError` for a layer that is no `nn.TransformerEncoderLayer`, or whose class computes
        something else (overrides `forward`, `_sa_block` or `_ff_block`).
        """
        if not isinstance(layer, TransformerEncoderLayer):
            raise TypeError(f"layer: expected an nn.TransformerEncoderLayer, got {type(layer).__name__}")
        for name in ("forward", *ENCODER_HALVES):
            ours = isinstance(layer, FusedCheckpointBlock) and getattr(type(layer), name) is getattr(cls, name)
            if not ours and getattr(type(layer), name) is not getattr(TransformerEncoderLayer, name):
                raise TypeError(f"layer: expected PyTorch's own {name}, but {type(layer).__name__} overrides it")
            if name in vars(layer):
                raise TypeError(f"layer: expected PyTorch's own {name}, but this layer has one of its own")
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        for name, value in vars(layer).items():
            vars(block)[name] = value.copy() if isinstance(value, dict) else value
        block.keep = keep
        return block

    def forward(  # type: ignore[override]
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        modulation: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The block's output, shaped as src.

        **Shapes** src_mask: [T, T] or [B·H, T, T], bool (True: may not attend) or floating (added).
        src_key_padding_mask: [B, T], bool (True: padding) or floating. cu_seqlens: [S+1], the bounds of the
        sequences packed in src [1, N, C]. rotary: cos and sin in place of the module's own, [T, r] or [B, T, r].
        modulation: [B, 6, C], of a modulated block: shift, scale and gate of attention, then of the FFN, so that a half
        is x + gate · f(norm(x) · (1 + scale) + shift). It gets its gradient.
        generator: the source of dropout's seed; None: PyTorch's default generator.
        **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came.
        **Source** `nn.TransformerEncoderLayer.forward`; with `is_causal`, `src_mask` is taken for the causal mask. Its
        modulation: Peebles and Xie 2022 (arXiv 2212.09748), section 3.2.
        """
        beside = {"cu_seqlens": cu_seqlens, "rotary": rotary}
        if isinstance(src, Tensor) and src.is_nested:
            refuse_generic("src is a nested tensor", **beside, modulation=modulation, generator=generator)
            encoder.refuse_unread_adapter(self.self_attn, "src is a nested tensor")
            return TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal=is_causal)
        check_modulation(self, src, modulation)
        given = (src_mask, src_key_padding_mask, is_causal, modulation)
        return run_module(self, self._plain, generator, src, *given, **beside)

    def parts(self) -> Parts | Reason:
        # A subclass may compute something else, and so may this one block.
        for name, method in _METHODS.items():
            if getattr(type(self), name) is not method or name in vars(self):
                return Reason(f"{type(self).__name__} overrides _sa_block or _ff_block")
        if is_replaced(TransformerEncoderLayer):  # which the generic path calls
            return Reason("nn.TransformerEncoderLayer.forward was patched")
        attn = attention_parts(self)
        if isinstance(attn, Reason):
            return attn
        ffn = ffn_parts(self)
        if isinstance(ffn, Reason):
            return ffn
        if self.modulated:
            if any(getattr(norm, "weight", None) is not None for norm in (self.norm1, self.norm2)):
                return Reason("a norm of a modulated block has a weight of its own")
            attn, ffn = (half._replace(post=_GATE, modulated=True) for half in (attn, ffn))  # type: ignore[assignment]
        return Parts(attn, ffn, self.parallel, child(self, "self_attn").embed_dim, encoder.ENCODER_NAMES)

    def inputs(  # type: ignore[override]
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        modulation: Tensor | None = None,
        **beside: Any,
    ) -> Inputs | Reason:
        found = attention_inputs(self, src, src_mask, src_key_padding_mask, is_causal, **beside)
        if isinstance(found, Reason):
            return found
        vectors = {} if modulation is None else vectors_of(modulation)
        return found._replace(vectors=vectors | coefficients_of(self.activation))

    def _plain(
        self,
        src: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool,
        modulation: Tensor | None = None,
    ) -> Tensor:
        if is_causal and src_mask is None:
            length = src.size(-2 if self.self_attn.batch_first or src.dim() == 2 else 0)
            src_mask = nn.Transformer.generate_square_subsequent_mask(length, src.device, src.dtype)
        if modulation is not None:
            shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation.unsqueeze(2).unbind(1)
            x = (self.norm1(src) * (1 + scale) + shift).to(src.dtype)
            x = (src + gate * self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)).to(src.dtype)
            h = (self.norm2(x) * (1 + scale_ff) + shift_ff).to(src.dtype)
            return (x + gate_ff * self._ff_block(h)).to(src.dtype)
        if not self.parallel:
            return TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal=is_causal)
        x = self.norm1(src)
        attention = self._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)
        return src + attention + self._ff_block(x if self.norm2 is None else self.norm2(src))

    def extra_repr(self) -> str:
        words = [super().extra_repr(), f"norm_first={self.norm_first}", f"batch_first={self.self_attn.batch_first}"]
        return ", ".join(
            words + ([f"parallel={self.parallel!r}"] if self.parallel else []) + ["modulated=True"] * self.modulated
        )
