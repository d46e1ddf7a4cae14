"""What the fused modules share: adapters of themselves, as a family's adapter is of another library's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.checks import check_generator, check_plain
from ckptfused.layer.activations import plain_activation
from ckptfused.layer.call import build_call, learned, text_here
from ckptfused.layer.encoder import refuse_unread_adapter
from ckptfused.layer.facts import LayerFacts, LayerKey
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Inputs, Parts, Reason
from ckptfused.layer.remembered import remembered_facts
from ckptfused.layer.sdpa import same_sdpa, under_foreign_mode
from ckptfused.layer.shards import refuse_tensor_parallel
from ckptfused.layer.spec_text import Mode, keep_text, kept_names
from ckptfused.ops.call import Call
from ckptfused.ops.enclosing_checkpoint import hidden_from_it
from ckptfused.sizes import parse_bytes
from ckptfused.spec import BlockSpec, Keep, check_names, check_probability


class FusedModule(nn.Module):
    """Base of the modules that run as one block op.

    Subclasses say their `parts` and `inputs`, as they are at every call: `layer.dropout.p = 0.2` or
    `layer.norm_first = True` take effect as they do in PyTorch. Parts are read anew where anything of the module or
    its children has changed since (`layer.remembered`). Saving is decided by grad mode and `requires_grad`
    alone; `eval()` only turns dropout off.
    """

    _mode = Mode()
    takes_masks = True

    @property
    def keep(self) -> Keep:
        """What is kept for backward: a preset's name, or the tuple of names that was given."""
        return kept_names(self._mode.keep)

    @keep.setter
    def keep(self, keep: Keep) -> None:
        text = keep_text(keep)
        layer = self._described()
        if isinstance(layer, Reason):
            check_names(keep)
        else:
            self._spec(layer.key, Mode()).with_keep(kept_names(text))
        self._mode = self._mode._replace(keep=text)

    @property
    def scratch(self) -> int | None:
        """Bytes of scratch above which the FFN, and on a CPU attention, goes in tiles; None: by device."""
        return self._mode.scratch or None

    @scratch.setter
    def scratch(self, scratch: int | str | None) -> None:
        limit = 0 if scratch is None else parse_bytes("scratch", scratch)
        self._mode = self._mode._replace(scratch=limit)

    def spec(self, dtype: torch.dtype = torch.float32) -> BlockSpec:
        """The spec of the present state, called without masks on an x of this dtype.

        **Raises** `ValueError` where the module runs generically.
        """
        layer = self._described(dtype)
        if isinstance(layer, Reason):
            raise ValueError(f"spec: expected a module that runs as one op, this one runs generically ({layer.text})")
        return self._spec(layer.key, self._mode)

    def _spec(self, layer: LayerKey, mode: Mode) -> BlockSpec:
        inputs = self.inputs(torch.empty(1, 1, layer.width, device="meta"))
        assert isinstance(inputs, Inputs)  # reasons are of masks and tables that are given
        return BlockSpec.parse(text_here(layer, inputs, mode))

    def __setattr__(self, name: str, value: Any) -> None:
        # A name of a function is as good as in the constructor, where PyTorch's layer would fail at the call.
        made: Any = value
        if name == "activation":
            first = self._modules.get("linear1")
            like = None if first is None else getattr(first, "weight", None)
            made = plain_activation(value, *(() if like is None else (like.device, like.dtype)))
            if not isinstance(made, nn.Module):
                self._modules.pop(name, None)
        super().__setattr__(name, made)

    def generic_reason(self, *masks: Tensor | None) -> str | None:
        """Why a call with these masks is checkpointed generically; None where it runs as one op."""
        layer = self._described()
        why = layer if isinstance(layer, Reason) else learned(masks)
        return None if why is None else why.text

    def parts(self) -> Parts | Reason:
        """The pieces of the module, as they are now, or why the kernels do not compute what they do."""
        raise AssertionError("each fused module says its parts")

    def inputs(self, src: Tensor, *args: Any, **kwargs: Any) -> Inputs | Reason:
        """What `forward` was called with, checked, or why such a call is not one op.

        **Raises** `ValueError` or `TypeError` naming the argument.
        """
        raise AssertionError("each fused module says its inputs")

    def _described(self, dtype: torch.dtype = torch.float32) -> LayerFacts | Reason:
        return remembered_facts(self, dtype)

    def prepare(self, src: Tensor, *args: Any, **kwargs: Any) -> Call | Reason:
        """The op call for these arguments of `forward`, checked, or why it runs generically."""
        layer = self._described(src.dtype)
        if isinstance(layer, Reason):
            return layer
        inputs = self.inputs(src, *args, **kwargs)
        call = inputs if isinstance(inputs, Reason) else build_call(layer, inputs, self._mode)
        if isinstance(call, Reason) and call.error is not None:
            raise call.error(call.text)
        return call

    def extra_repr(self) -> str:
        why = self.generic_reason()
        limit = f", scratch={self.scratch}" if self.scratch else ""
        return f"keep={self.keep!r}{limit}" + (f", runs generically ({why})" if why else "")


def another(kinds: tuple[type, ...], **layers: Any) -> Reason | None:
    """Which of the named layers is of another class than these, for which the kernels stand in, or is watched."""
    for name, layer in layers.items():
        if type(layer) not in kinds:
            what = f"{type(layer).__module__}.{type(layer).__name__}"
            return Reason(f"{name} is a {what}, not PyTorch's {kinds[0].__name__}")
        if (why := watched(layer, name)) is not None:
            return why
    return None


def check_call(
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    *,
    cu_seqlens: Any = None,
    rotary: Any = None,
    generator: Any = None,
) -> None:
    """**Raises** `TypeError` for arguments of a forward that no path can take, before anything asks them."""
    if not (isinstance(src, Tensor) and src.is_nested):
        check_plain("src", src)
    if src_mask is not None:
        check_plain("src_mask", src_mask)
    if src_key_padding_mask is not None:
        check_plain("src_key_padding_mask", src_key_padding_mask)
    if cu_seqlens is not None:
        check_plain("cu_seqlens", cu_seqlens)
    check_generator(generator)
    if rotary is not None:
        if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
            raise TypeError(f"rotary: expected a pair of tensors, cos and sin, or None, got {type(rotary).__name__}")
        for name, value in zip(("rotary[0]", "rotary[1]"), rotary, strict=True):
            check_plain(name, value)


def run_module(
    module: FusedModule,
    plain: Callable[..., Tensor],
    generator: torch.Generator | None,
    src: Tensor,
    *args: Any,
    **only_fused: Any,
) -> Tensor:
    """One op, or, for what the kernels cannot compute, `plain` layers under `ckptfused.checkpoint`.

    args: what both take, masks first; only_fused: what only the op takes, the generator aside.
    """
    check_call(src, *args[:2], **only_fused, generator=generator)
    call = module.prepare(src, *args, **only_fused)
    if isinstance(call, Reason):
        refuse_generic(call.text, **only_fused, generator=generator)
        return run_generic(module, call, plain, src, *args)
    with hidden_from_it(module, module._mode.inputs_alone):
        y = call.run(generator)
    return y.view(src.shape) if src.dim() == 2 else y  # one sequence comes back without a batch dimension


def run_generic(module: FusedModule, why: Reason, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The generic path; no replay could find a `TorchFunctionMode` again."""
    refuse_tensor_parallel(module)
    if module.takes_masks:
        refuse_unread_adapter(module.self_attn, why.text)
    if why.original or under_foreign_mode():
        return function(*args)
    with hidden_from_it(module):
        return checkpoint(same_sdpa(function), *args)


def refuse_generic(why: str, **given: Any) -> None:
    """**Raises** `ValueError` where a call that is not one op was given what only the ops take."""
    names = ", ".join(name for name, value in given.items() if value is not None)
    if names:
        raise ValueError(f"{names}: leave it out, for this call runs generically ({why})")


def rates(dropout: float, **sites: float | None) -> list[float]:
    """The probability at each named site, `dropout` where the site says None. **Raises** `ValueError`."""
    common = check_probability("dropout", dropout)
    return [common if value is None else check_probability(name, value) for name, value in sites.items()]
