"""The call of a block op: where every way to one ends, from `functional`, the modules and converted layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused import rng
from ckptfused._extension import _C  # registers the ops, too
from ckptfused.checks import compute_word, transformed
from ckptfused.eager.from_op import plain_block, torch_masks
from ckptfused.masks import NO_MASK, Mask
from ckptfused.ops import enclosing_checkpoint, second_order  # noqa: F401  (the first two register the ops)
from ckptfused.ops.kv_cache import keeping_qkv, keys_and_values
from ckptfused.spec import parse

SlotTensors = list[Tensor | None]
# A name without its overload is looked up at each call.
_OPS = {name: getattr(torch.ops.ckptfused, name).default for name in ("block", "attention_block", "ffn_block")}


def end_replay(x: Tensor, beside: SlotTensors, state: Callable[[], Tensor] | None = None) -> None:
    """Ends a replay that waits for these inputs alone, before the call that saves them and its random state:
    nobody would use what it returns."""
    inputs = [t for t in beside if t is not None]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *inputs)):
        return
    save = enclosing_checkpoint.ends_with(1 + len(inputs) + (state is not None))
    if save is not None:
        for t in (x, *([] if state is None else [state()]), *inputs):
            save(t)


def checked_before_backward(y: Tensor, checks: Sequence[Callable[[], None]]) -> Tensor:
    """The result of an op, in whose backward these are called first."""
    if checks and y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda _: [check() for check in checks] and None)
    return y


class Call(NamedTuple):
    """The arguments of one block op, checked. **Shapes** as `functional.block`, x with three dimensions."""

    op: str
    """`"block"`, `"attention_block"` or `"ffn_block"`."""
    x: Tensor
    slots: SlotTensors
    text: str
    masks: Mask = NO_MASK
    cos: Tensor | None = None
    sin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    keep_keys: Callable[[Tensor, Tensor], object] | None = None
    """Takes the call's keys and values, where gradients are off: a key/value cache."""
    q_scale: Tensor | None = None
    checks: Sequence[Callable[[], None]] = ()
    """Each is called before a backward, and may raise."""

    @property
    def aux(self) -> SlotTensors:
        """The tensors beside x and the parameters, in the order of `spec.AUX_NAMES`."""
        return [self.cos, self.sin, self.masks.mask, self.masks.padding, self.cu_seqlens, self.q_scale]

    def run(self, generator: torch.Generator | None = None) -> Tensor:
        """The block's output. Under transforms of `torch.func`, forward-mode derivatives and `torch.jit.trace` plain
        PyTorch computes the same, with its own dropout.
        """
        if self.keep_keys is not None and not torch.is_grad_enabled():
            return self._handing_keys_on(self.keep_keys, generator)
        x, slots, aux, text = self.x, self.slots, self.aux, self.text
        if transformed():
            text += compute_word(x)
            return plain_block(x, slots, aux, text, torch_masks(x, aux, text, generator))
        if torch.compiler.is_compiling():
            return _OPS[self.op](x, slots, aux, text, generator=generator)
        draws = parse(text).has_dropout
        if draws:
            generator = enclosing_checkpoint.source(x, generator)
        if "keep=" not in text:
            end_replay(x, [*slots, *aux], (lambda: rng.state(x, generator)) if draws else None)
        y = _C.call_block(self.op, x, slots, aux, text) if generator is None else None
        if y is None:
            y = _OPS[self.op](x, slots, aux, text, generator=generator)
        return checked_before_backward(y, self.checks)

    def _handing_keys_on(
        self, keep_keys: Callable[[Tensor, Tensor], object], generator: torch.Generator | None
    ) -> Tensor:
        """The same bits and the same draw, without gradients, by the op that returns the QKV product beside."""
        x, slots = self.x, self.slots
        text, draws = keeping_qkv(self.text + compute_word(x))
        if draws:
            generator = enclosing_checkpoint.source(x, generator)
        state = rng.state(x, generator) if draws else None
        forward = getattr(torch.ops.ckptfused, f"{self.op}_fwd")
        y, qkv = forward(x, slots, self.aux, state, text, True)
        keep_keys(*keys_and_values(qkv, slots, text, self.cos, self.sin))
        return y
