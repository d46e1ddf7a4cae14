"""`linear_cross_entropy` as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ckptfused.loss.function import LossOutput, linear_cross_entropy, spec_options
from ckptfused.spec import LossSpec
from ckptfused.spec.checks import check_flag


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its options set; the head's weight stays the model's.

    `LinearCrossEntropyLoss(label_smoothing=0.1)(x, lm_head.weight, target)`. Options and **Raises** as there; what is
    wrong with an option is said at once.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = linear_cross_entropy.__kwdefaults__ or {}
        per_call = ("num_items", "adapters", "generator")
        for name in options:
            if name not in known or name in per_call:
                names = ", ".join(name for name in known if name not in per_call)
                raise TypeError(f"{name}: expected an option among {names}, got an unknown one")
        values = {**known, **options}
        fields = ("reduction", "softcap", "scratch", "keep", "ignore_index", "label_smoothing", "logit_scale", "z_loss")
        LossSpec(**spec_options(**{name: values[name] for name in fields}))
        for name in ("shift", "return_tokens"):
            check_flag(name, values[name])
        self.options = options

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **per_call: Any
    ) -> Tensor | LossOutput:
        """The loss. `per_call`: `num_items`, `adapters`, `generator`, or an option for this call."""
        return linear_cross_entropy(x, weight, target, bias, **{**self.options, **per_call})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
