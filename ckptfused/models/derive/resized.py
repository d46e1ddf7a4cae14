"""Copies of a call in float64, of other sizes, with random values."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused.compat.pytree import tree_flatten, tree_unflatten
from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.derive.rules.mask_forms import HIDES
from ckptfused.models.derive.rules.rotations import MOST_FIRST, like_table

_FEW = 2
"""Tokens of the second of two streams in a proof."""


class Sizes(NamedTuple):
    """The batch and the tokens of a call, and how many of these its tables leave out at the front."""

    batch: int
    tokens: int
    first: int = 0

    @classmethod
    def of(cls, args: Any, kwargs: Any, streams: bool = False) -> Sizes:
        """The sizes of a call with x [B, T, C], its first tensor, or its first two; of tables two are alike."""
        x, *others = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        if x.dim() != 3:
            raise RefusedError("the layer is not called with x [B, T, C]")
        if streams:
            return cls(x.size(0), x.size(1) + others[0].size(1))
        shapes = Counter(t.shape for t in others if t.is_floating_point() and t.dim() in (2, 3))
        rows = (shape[-2] for shape, _ in shapes.most_common() if shape[-1] % 2 == 0)
        left_out = (x.size(1) - n for n in rows if 0 < x.size(1) - n <= MOST_FIRST)
        return cls(x.size(0), x.size(1), next(left_out, 0))


def are_streams(args: Any, kwargs: Any) -> bool:
    """Whether the first two tensors of a call may be two parts of the tokens of one x."""
    x, *others = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    shapes = [(*t.shape[::2], t.dtype, t.dim()) for t in (x, *others[:1])]
    return len(shapes) == 2 and x.dim() == 3 and shapes[0] == shapes[1]


def resized_call(
    args: Any,
    kwargs: Any,
    sizes: Sizes,
    generator: torch.Generator,
    first_key: bool,
    folded: bool = False,
    streams: bool = False,
) -> tuple[Any, Any]:
    """A call of other sizes with random values in float64. first_key: what boolean masks say of the first key. folded:
    what is [n, 1 or T, T] has an entry for each head of each batch element, not for each head; what is [B, …, C], or
    [B] integers, goes with the batch alone, whatever else is as long as x. streams: x is the first two tensors.
    """
    leaves, tree = tree_flatten((args, kwargs))
    x, *others = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    was = sizes._replace(batch=x.size(0), tokens=x.size(1) + (others[0].size(1) if streams else 0))
    lengths = {id(x): sizes.tokens - _FEW, id(others[0]): _FEW} if streams else {id(x): sizes.tokens}
    made = []
    for leaf in leaves:
        if id(leaf) in lengths:
            part = sizes.batch, lengths[id(leaf)], x.size(2)
            made.append(torch.randn(part, dtype=torch.float64, generator=generator).requires_grad_())
        elif isinstance(leaf, Tensor):
            found = _resized(leaf, was, sizes, generator, first_key, folded)
            if folded and (shape := _by_batch(leaf, was, sizes, x.size(2))) is not None:
                found = torch.randn(shape, dtype=torch.float64, generator=generator)
                found = found if leaf.is_floating_point() else torch.arange(sizes.batch, dtype=leaf.dtype)
            made.append(found.requires_grad_(leaf.requires_grad and found.is_floating_point()))
        else:
            made.append(leaf)
    return tree_unflatten(made, tree)


def _by_batch(t: Tensor, was: Sizes, now: Sizes, width: int) -> tuple[int, ...] | None:
    """The shape of a condition in another batch; None of what may not be one."""
    if t.dim() == 1 and not t.is_floating_point() and t.dtype != torch.bool:
        return (now.batch,) if t.size(0) == was.batch else None
    is_one = t.is_floating_point() and t.dim() in (2, 3) and t.size(0) == was.batch and t.size(-1) == width
    return (now.batch if was.batch > 1 else 1, *t.shape[1:]) if is_one else None


def _resized(t: Tensor, was: Sizes, now: Sizes, generator: torch.Generator, first_key: bool, folded: bool) -> Tensor:
    if t.is_complex():
        return torch.view_as_complex(_resized(torch.view_as_real(t), was, now, generator, first_key, folded))
    adds = _adds(t, was.tokens)
    turned = (was.tokens, was.tokens - was.first)
    table = t.is_floating_point() and t.dim() in (2, 3) and t.size(-2) in turned and not adds
    pairs = t.is_floating_point() and t.dim() > 2 and t.size(-1) == 2
    folded = adds or (folded and t.dim() == 3 and t.size(1) in (1, was.tokens) and t.size(2) == was.tokens)
    shape = list(t.shape)
    for i, size in enumerate(shape):
        if i == 0 and size == was.batch and (t.dim() > 1 or size != was.tokens) and not (t.dim() == 2 and table):
            shape[i] = now.batch if size > 1 else 1
        elif i == 0 and folded and t.dim() == 3 and size % was.batch == 0 and size > 1:
            shape[i] = size // was.batch * now.batch
        elif pairs and was.tokens in t.shape[:i]:
            continue
        elif was.first and i == t.dim() - 2 and size == was.tokens - was.first and t.is_floating_point():
            shape[i] = now.tokens - now.first
        elif size == was.tokens and not (table and i == t.dim() - 1 and t.shape[-1] != t.shape[-2]):
            shape[i] = now.tokens
    if table and t.size(-1) == was.tokens and t.dim() == 3:
        shape[-1] = t.size(-1)
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    if t.dtype == torch.bool:
        found = made > 0
        if found.dim():
            found[..., 0], found[..., 1] = first_key, not first_key
        return found
    if not t.is_floating_point():
        return torch.arange(shape[-1] if shape else 1).expand(shape).to(t.dtype).clone()
    if adds or (t.dim() == 4 and shape[-1] == now.tokens and shape[-2] in (1, now.tokens)):
        hidden = torch.rand(shape, generator=generator) < 0.3
        hidden[..., 0] = False
        return made.masked_fill(hidden, -torch.inf)
    return like_table(t, made)


def _adds(t: Tensor, tokens: int) -> bool:
    """Whether a tensor is a mask to be added to logits: nothing but zeros, or with entries that hide a key."""
    if not t.is_floating_point() or t.is_meta or t.dim() < 2 or t.numel() == 0:
        return False
    return t.size(-1) == t.size(-2) == tokens and bool((t <= HIDES).any() or (t == 0).all())
