"""What the fused modules share: `keep`, the spec of the present state, and the generic path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.checks import check_generator
from ckptfused.functional import check_plain
from ckptfused.modules.activations import plain_activation
from ckptfused.modules.assemble import Call, keep_text, keeps_inputs_alone
from ckptfused.modules.sdpa import same_sdpa, under_foreign_mode
from ckptfused.modules.shards import refuse_tensor_parallel
from ckptfused.outer_checkpoint import passed
from ckptfused.spec import BlockSpec, Keep, check_names, check_probability


class FusedModule(nn.Module):
    """Base of the modules that run as one block op.

    Saving is decided by grad mode and `requires_grad` alone; `eval()` only turns dropout off.
    """

    _keep: str = "inputs"
    takes_masks = True

    @property
    def keep(self) -> Keep:
        """What is kept for backward: a preset's name, or the tuple of names that was given."""
        return tuple(filter(None, self._keep[1:].split("+"))) if self._keep.startswith("=") else self._keep

    @keep.setter
    def keep(self, keep: Keep) -> None:
        before, self._keep = self._keep, keep_text(keep)
        try:
            if self.fusable():
                self.spec()
            else:
                check_names(keep)
        except ValueError:
            self._keep = before
            raise

    def spec(self, dtype: torch.dtype = torch.float32) -> BlockSpec:
        """The spec of the present state, called without masks on an x of this dtype. **Raises** `ValueError`."""
        return BlockSpec.parse(self._text(torch.empty(0, dtype=dtype)))

    def __setattr__(self, name: str, value: Any) -> None:
        # A name of a function is as good as in the constructor, where PyTorch's layer would fail at the call.
        made: Any = plain_activation(value) if name == "activation" else value
        super().__setattr__(name, made)

    def fusable(self) -> bool:
        """Whether the next call runs as one op; otherwise it is checkpointed generically."""
        return self.generic_reason() is None

    def generic_reason(self, *masks: Tensor | None) -> str | None:
        """Why a call with these masks is checkpointed generically; None where it runs as one op."""
        return self._unknown_layers() or ("a mask needs a gradient" if needs_gradient(*masks) else None)

    def _unknown_layers(self) -> str | None:
        raise AssertionError("each fused module says what it can fuse")

    def prepare(self, src: Tensor, *args: Any, **kwargs: Any) -> Call:
        """The op call for these arguments of `forward`, checked."""
        raise AssertionError("each fused module prepares its own call")

    def _text(self, x: Tensor, inputs: str = "") -> str:
        raise AssertionError("each fused module writes its own spec")

    def extra_repr(self) -> str:
        why = self.generic_reason()
        return f"keep={self.keep!r}" + (f", runs generically ({why})" if why else "")


def check_call(
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    cu_seqlens: Any = None,
    rotary: Any = None,
    generator: Any = None,
) -> None:
    """**Raises** `TypeError` for arguments of a forward that no path can take, before anything asks them."""
    if not (isinstance(src, Tensor) and src.is_nested):
        check_plain("src", src)
    beside = {"src_mask": src_mask, "src_key_padding_mask": src_key_padding_mask, "cu_seqlens": cu_seqlens}
    for name, value in beside.items():
        if value is not None:
            check_plain(name, value)
    check_generator(generator)
    if rotary is not None:
        if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
            raise TypeError(f"rotary: expected a pair of tensors, cos and sin, or None, got {type(rotary).__name__}")
        for name, value in zip(("rotary[0]", "rotary[1]"), rotary, strict=True):
            check_plain(name, value)


def run_fused(module: FusedModule, src: Tensor, generator: torch.Generator | None, *args: Any) -> Tensor:
    """The fused path: one op; one sequence without a batch dimension comes back without one."""
    call = module.prepare(src, *args)
    with passed(module, keeps_inputs_alone(module._keep)):
        y = call.run(generator)
    return y.view(src.shape) if src.dim() == 2 else y


def run_generic(module: FusedModule, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The path for what the kernels cannot compute: plain layers under `ckptfused.checkpoint`; no replay could find a
    `TorchFunctionMode` again.
    """
    refuse_tensor_parallel(module)
    if under_foreign_mode():
        return function(*args)
    with passed(module):
        return checkpoint(same_sdpa(function), *args)


def refuse_generic(why: str, **given: Any) -> None:
    """**Raises** `ValueError` where a call that is not one op was given what only the ops take."""
    names = ", ".join(name for name, value in given.items() if value is not None)
    if names:
        raise ValueError(f"{names}: expected None, for this call runs generically ({why})")


def needs_gradient(*masks: Tensor | None) -> bool:
    """Whether a mask is learned: the fused backward gives masks no gradient."""
    return torch.is_grad_enabled() and any(mask is not None and mask.requires_grad for mask in masks)


def rates(dropout: float, **sites: float | None) -> list[float]:
    """The probability at each named site, `dropout` where the site says None. **Raises** `ValueError`."""
    common = check_probability("dropout", dropout)
    return [common if value is None else check_probability(name, value) for name, value in sites.items()]
