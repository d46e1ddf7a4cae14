"""The FFN half of a block as a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Dropout

from ckptfused.checks import check_input
from ckptfused.layer import encoder
from ckptfused.layer.activations import Activation, activation_kind, coefficients_of, plain_activation
from ckptfused.layer.norms import make_norm
from ckptfused.layer.parts import FFN, Inputs, Parts, Reason, child
from ckptfused.modules.fused import FusedModule, another, rates, run_module
from ckptfused.spec import GATED_ACTIVATIONS, Keep
from ckptfused.spec.checks import check_flag, check_integer


def ffn_parts(layer: Any) -> FFN | Reason:
    """The FFN half of a module with `linear1`, `dropout`, `linear2`, `norm2` and `dropout2`."""
    last = child(layer, "dropout2")
    why = another((Dropout,), dropout=child(layer, "dropout"), dropout2=last)
    if why is not None:
        return why
    gated = activation_kind(layer.activation) in GATED_ACTIVATIONS
    return encoder.ffn(layer, child(layer, "norm2"), last, gated)


class FusedCheckpointFFN(FusedModule):
    """The FFN half of a block alone: norm, both projections, activation, dropout and residual in one op.

    `x + drop(ffn(norm(x)))` with `norm_first`, `norm(x + drop(ffn(x)))` without; `norm="none"` leaves it out, and
    `residual=False` the sum with x, for a model that adds it itself.
    Submodules `linear1`, `dropout`, `linear2`, `norm2`, `dropout2` carry the names that they have in
    `FusedCheckpointBlock`; a gated `linear1` is [2F, C], gate first.

    **Shapes** src: [..., C] with one to two leading dimensions; float64, float32, bfloat16, float16.
    **Saves** src, what `keep` names, 16 bytes of random state in training with dropout.
    **Recomputes** the first product unless kept; the second too where the closing norm needs it.
    **Raises** `ValueError` or `TypeError` naming the argument, what was expected and what came.
    **Source** `nn.TransformerEncoderLayer`, its `_ff_block`, norm and residual.
    """

    takes_masks = False

    def __init__(
        self,
        d_model: int,
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
        residual_dropout: float | None = None,
        ffn_dropout: float | None = None,
        residual: bool = True,
        keep: Keep = "inputs",
        scratch: int | str | None = None,
    ) -> None:
        super().__init__()
        d_model, hidden = check_integer("d_model", d_model, 1), check_integer("dim_feedforward", dim_feedforward, 1)
        bias = check_flag("bias", bias)
        p_hidden, p_res = rates(dropout, ffn_dropout=ffn_dropout, residual_dropout=residual_dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = plain_activation(activation, **factory)
        gated = activation_kind(self.activation) in GATED_ACTIVATIONS
        self.batch_first = check_flag("batch_first", batch_first)
        self.linear1 = nn.Linear(d_model, hidden * (2 if gated else 1), bias=bias, **factory)
        self.dropout = nn.Dropout(p_hidden)
        self.linear2 = nn.Linear(hidden, d_model, bias=bias, **factory)
        self.norm_first = check_flag("norm_first", norm_first)
        self.norm2 = None if norm == "none" else make_norm(norm, d_model, layer_norm_eps, bias, device, dtype)
        self.dropout2 = nn.Dropout(p_res)
        self.residual = check_flag("residual", residual)
        self.keep, self.scratch = keep, scratch

    def forward(self, src: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The half's output, shaped as src."""
        return run_module(self, self._plain, generator, src)

    def parts(self) -> Parts | Reason:
        ffn = ffn_parts(self)
        return (
            ffn
            if isinstance(ffn, Reason)
            else Parts(
                ffn=ffn._replace(residual=self.residual), width=self.linear2.out_features, names=encoder.ENCODER_NAMES
            )
        )

    def inputs(self, src: Tensor, *args: Any, **kwargs: Any) -> Inputs:
        check_input(src, self.linear2.out_features, "src")
        x = src.unsqueeze(0 if self.batch_first else 1) if src.dim() == 2 else src
        return Inputs(x, seq_first=not self.batch_first, vectors=coefficients_of(self.activation))

    def _plain(self, src: Tensor) -> Tensor:
        x = self.norm2(src) if self.norm_first and self.norm2 is not None else src
        f = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        y = src + f if self.residual else f
        return y if self.norm_first or self.norm2 is None else self.norm2(y)
