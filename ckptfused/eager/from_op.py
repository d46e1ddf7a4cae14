"""A block op in plain PyTorch: for derivatives that the op itself does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptfused import _extension  # noqa: F401  (registers the ops)
from ckptfused.checks import computing_in
from ckptfused.eager.block import eager_block, mask_shapes
from ckptfused.eager.dequantize import with_plain_weights
from ckptfused.eager.dropout import random_mask
from ckptfused.spec import AUX_NAMES, param_names, parse


def plain_block(
    x: Tensor,
    params: Sequence[Tensor | None],
    aux: Sequence[Tensor | None],
    text: str,
    masks: Mapping[int, Tensor],
) -> Tensor:
    """What a block op computes, by operations that PyTorch can differentiate any number of times, in any mode.

    **Shapes** x, params, aux: as the op takes them. masks: the keep mask of each dropout site, by its number.
    **Saves** what PyTorch's own operations save, the T × T matrix among it.
    **Source** `eager.block.eager_block`.
    """
    spec = parse(text)
    named: Any = with_plain_weights(dict(zip(param_names(spec), params, strict=True)), spec, x)
    inputs: Any = dict(zip(AUX_NAMES, aux, strict=True))
    with computing_in(x, x.dtype if spec.compute is None else getattr(torch, spec.compute)):  # as the op had it
        return eager_block(x, named, spec, **inputs, masks=masks)


def masks_of_op(x: Tensor, aux: Sequence[Tensor | None], text: str, state: Tensor | None) -> dict[int, Tensor]:
    """The keep masks that the op drew from `state`, by site."""
    wanted = _mask_shapes(x, aux, text) if state is not None else {}
    return {site: torch.ops.ckptfused.dropout_mask(list(shape), p, state, site) for site, (p, shape) in wanted.items()}  # type: ignore[arg-type]


def torch_masks(
    x: Tensor, aux: Sequence[Tensor | None], text: str, generator: torch.Generator | None
) -> dict[int, Tensor]:
    """Keep masks by site that PyTorch's own generator draws."""
    return {site: random_mask(shape, p, x.device, generator) for site, (p, shape) in _mask_shapes(x, aux, text).items()}


def _mask_shapes(x: Tensor, aux: Sequence[Tensor | None], text: str) -> dict[int, tuple[float, tuple[int, ...]]]:
    spec = parse(text)
    batch, tokens = x.shape[1::-1] if spec.seq_first else x.shape[:2]
    return mask_shapes(spec, batch, tokens, x.size(-1), aux[AUX_NAMES.index("cu_seqlens")])
