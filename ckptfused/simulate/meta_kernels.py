"""What ops of PyTorch's allocate that have no kernel for meta tensors, or one whose results differ from a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.torch_autograd import working_node
from ckptfused.compat.torch_memory import sparse_parts
from ckptfused.ops.fake import hold_surplus

aten = torch.ops.aten


def kernel_on_meta(func: Any, device: str, copies: list[Tensor]) -> Callable[..., Any]:
    """An op, or what stands for it on a device of this kind. copies: gets what the op holds until it ends."""
    if func in _SPARSE:
        return partial(_of_layout, func, copies)
    stand_in = _STAND_INS.get(func.overloadpacket) or (_ON_CPU.get(func.overloadpacket) if device == "cpu" else None)
    return func if stand_in is None else partial(stand_in, copies)


def _of_layout(func: Any, copies: list[Tensor], x: Any, *others: Any, **options: Any) -> Any:
    given = [t for t in (x, *others) if isinstance(t, Tensor)]
    is_sparse = any(t.is_meta and t.layout == torch.sparse_coo for t in given)
    return _SPARSE[func](copies, x, *others) if is_sparse else func(x, *others, **options)


def _sparse(indices: Tensor, values: Tensor, like: Tensor, coalesced: bool = False) -> Tensor:
    options: Any = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    make = aten._sparse_coo_tensor_with_dims_and_tensors  # which asks for no checks, and warns of none
    sizes = like.sparse_dim(), like.dense_dim(), like.shape
    return make(*sizes, indices, values, **options, is_coalesced=coalesced)  # type: ignore[no-any-return]


def _clone(copies: list[Tensor], x: Tensor) -> Tensor:
    """A sparse gradient, of which autograd keeps the parts; without data it copies it."""
    return _sparse(*sparse_parts(x), x)


def _add(copies: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The entries of both sparse gradients."""
    (indices, values), (more, theirs) = sparse_parts(x), sparse_parts(y)
    return _sparse(torch.cat([indices, more], 1), torch.cat([values, theirs]), x)


def _add_into(copies: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """A sparse gradient into a weight, or into those of earlier batches, which then has the entries of both."""
    if x.layout == torch.sparse_coo:
        parts = sparse_parts(y)
        copies += [t.new_empty(t.shape) for t in (*sparse_parts(x), *parts)]
        hold_surplus(sparse_parts(x)[1], list(parts))
    return x


def _coalesce(copies: list[Tensor], x: Tensor) -> Tensor:
    """Entries sorted by their places: as many as before, since no two may be of one place."""
    indices, values = sparse_parts(x)
    copies += [indices.new_empty(indices.size(1)) for _ in range(3)]
    return _sparse(torch.empty_like(indices), torch.empty_like(values), x, coalesced=True)


_SPARSE: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _clone,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_into,
    aten._coalesce.default: _coalesce,
}
"""PyTorch has no kernel of these for tensors without data, or one whose results have no entries."""


def _ctc_loss(
    copies: list[Tensor], log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *others: Any
) -> tuple[Tensor, Tensor]:
    """The losses, and the logarithms of the forward variables, which backward needs: of all prefixes of the longest
    target with blanks around each label. log_probs: [T, B, C]. A target whose length is not known is as long as any."""
    steps, batch = log_probs.shape[:2] if log_probs.dim() == 3 else (len(log_probs), 1)
    known = not isinstance(lengths, Tensor) or not lengths.is_meta
    longest = max(map(int, lengths), default=0) if known else targets.size(-1)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(
    copies: list[Tensor],
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Any,
    lengths: Any,
    losses: Tensor,
    log_alpha: Tensor,
    *others: Any,
) -> Tensor:
    copies.append(torch.empty_like(log_alpha))  # those of the suffixes
    return torch.empty_like(log_probs)


def _statistics_type(x: Tensor, *weights: Tensor | None) -> torch.dtype:
    """In which a norm keeps means and rstds: its own, but float32 beside weights in float32, as under autocast."""
    return torch.float32 if any(w is not None and w.dtype == torch.float32 for w in weights) else x.dtype


def _group_norm(
    copies: list[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, means and rstds [batch, groups]. sizes: channels, entries of one, groups and eps."""
    mean = x.new_empty(batch, sizes[2], dtype=_statistics_type(x, weight, bias))
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _group_norm_backward(
    copies: list[Tensor], grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, of those that the last argument asks for."""
    of_weight = mean.new_empty(others[1]) if weight is None else weight
    results = zip((x, of_weight, of_weight), others[-1], strict=True)
    return tuple(torch.empty_like(like) if asked else None for like, asked in results)


def _layer_norm(
    copies: list[Tensor], x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    mean = x.new_empty(rows, dtype=_statistics_type(x, weight, bias))
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


def _batch_norm(copies: list[Tensor], x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, means and rstds [C], which evaluation does not keep. others: weights, what runs, training, rates."""
    *weights, training, _, _ = others
    mean = x.new_empty(x.size(1) if training else 0, dtype=_statistics_type(x, *weights))
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _bag_backward(copies: list[Tensor], grad: Tensor, *others: Any) -> Tensor:
    """A gradient of maxima selects the rows of bags that hold something, and of what comes in; one of sums finds again
    which bag each row is in, which without data forward keeps, but for a last number."""
    out: Tensor = aten._embedding_bag_backward(grad, *others)
    mode, sparse = others[7:9]
    if mode == 2:
        copies += [] if grad.is_contiguous() else [grad.contiguous()]
        copies.append(grad.new_empty(grad.numel() * (8 + grad.itemsize) + 8 * len(grad), dtype=torch.uint8))
    elif mode == 1 and sparse:  # each row's share of its bag
        copies.append(grad.new_empty(2 * len(others[3]) + len(others[0])))
    elif mode == 0 and not sparse:
        hold_surplus(out, [out.new_empty(8, dtype=torch.uint8)])
    return out


def _histc(copies: list[Tensor], x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Without data PyTorch refuses to be deterministic, as on a GPU."""
    return x.new_empty(bins) if x.is_meta else aten.histc(x, bins, min, max)


def _where(copies: list[Tensor], condition: Tensor, *values: Any) -> Tensor:
    """Under a mode, autograd takes it for the gradient of a number that was filled in. Else it selects what is summed,
    which may be all, and makes two whole numbers an entry to do so: of where it is, and how many come before."""
    out: Tensor = aten.where(condition, *values)
    if working_node().startswith("MaskedFillBackward"):
        copies.append(out.new_empty(2 * 8 * out.numel(), dtype=torch.uint8))
    return out


def _nonzero(copies: list[Tensor], x: Tensor) -> Tensor:
    """The place of every entry, since any may be one: whole numbers [x.numel(), x.dim()]."""
    return x.new_empty(x.numel(), x.dim(), dtype=torch.int64) if x.is_meta else aten.nonzero(x)


def _masked_select(copies: list[Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """Every entry, in one dimension."""
    return x.new_empty(prod(torch.broadcast_shapes(x.shape, mask.shape))) if x.is_meta else x.masked_select(mask)


def _bincount(copies: list[Tensor], x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The `minlength` counts that a caller asks for, who knows how many there are: of experts, say."""
    if not x.is_meta or not minlength:
        return aten.bincount(x, weights, minlength)  # type: ignore[no-any-return]
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return x.new_empty(minlength, dtype=dtype)


SELECTING: dict[Any, Callable[..., Any]] = {aten.nonzero: _nonzero, aten.masked_select: _masked_select}
"""Ops whose values decide how much there is, and the most that may be."""
_STAND_INS: dict[Any, Callable[..., Any]] = SELECTING | {
    aten.bincount: _bincount,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
    aten.native_group_norm: _group_norm,
    aten.native_group_norm_backward: _group_norm_backward,
}
_ON_CPU: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit: _batch_norm,
    aten._embedding_bag_backward: _bag_backward,
    aten.histc: _histc,
    aten.where: _where,
}
"""On a GPU statistics are in float32, as the kernels for meta tensors have them."""
