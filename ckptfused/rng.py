"""The random numbers of dropout: a mask is a pure function of (seed, offset, site, element).

An element is dropped by 16 bits of it: p is rounded to a multiple of 2⁻¹⁶, half to even, and kept values are scaled by
1 / (1 − that multiple), so that the mean stays exact. From p = 2⁻¹⁷ (7.6e-6) downwards nothing is dropped.

To resume a run, save and restore PyTorch's own random state, as without ckptfused: `torch.get_rng_state()`, and of each
GPU `torch.cuda.get_rng_state(device)` (`get_rng_state_all()`), or `get_state()` of a generator that a block is called
with. There is no state beside these.

**Source** Philox4x32 with 7 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ckptfused import _extension  # noqa: F401  (registers the ops)
from ckptfused.checks import check_generator
from ckptfused.compat.torch_compile import constant_result
from ckptfused.eager import dropout
from ckptfused.spec.checks import check_integer, check_probability

__all__ = ["ATTENTION_PROBS", "ATTENTION_RESIDUAL", "FFN_HIDDEN", "FFN_RESIDUAL", "dropout_mask", "keep_scale", "state"]

ATTENTION_PROBS, ATTENTION_RESIDUAL, FFN_HIDDEN, FFN_RESIDUAL = range(4)
_call_ids = itertools.count(1 << 32)


def state(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws the random state that one block call uses.

    **Shapes** Result: int64[2], (seed, offset), on the device of `like`. On CPU the seed is one 64-bit draw from
    `generator` (None: PyTorch's default), the offset 0. On CUDA both are the generator's own, whose offset then moves
    on by 4; nothing is read back to the host, so that a captured graph draws anew at each replay.
    **Raises** `TypeError` for anything but a tensor and a generator.
    """
    if not isinstance(like, Tensor):
        raise TypeError(f"like: expected a tensor, got {like!r}")
    check_generator(generator)
    return torch.ops.ckptfused.rng_state(like, _fresh_id(), generator=generator)


@constant_result
def _fresh_id() -> int:
    """Never the same number twice in one compiled graph, nor one of a block's own or a segment's."""
    return next(_call_ids)


def dropout_mask(shape: Sequence[int], p: float, rng_state: Tensor, site: int) -> Tensor:
    """The keep mask of a whole tensor: what every kernel applies, for tests and debugging.

    **Shapes** shape: of the tensor that dropout applies to, batch-first: [B, T, C] for the residual sites,
    [B, T, F] for the hidden site, [B, H, T, T] for attention probabilities. rng_state: int64[2]. site: one of this
    module's four, or from 4 on those of adapters; it has 8 bits. Result: bool.
    **Raises** `ValueError` if p is outside [0, 1] or site outside 0 … 255; `TypeError` for a p that is no number, a
    site that is no integer, or another rng_state.
    """
    p = check_probability("p", p)
    if not isinstance(rng_state, Tensor) or rng_state.dtype != torch.int64 or rng_state.shape != (2,):
        got = f"{rng_state.dtype}{list(rng_state.shape)}" if isinstance(rng_state, Tensor) else repr(rng_state)
        raise TypeError(f"rng_state: expected an int64[2] tensor, got {got}")
    if check_integer("site", site, 0) > 255:
        raise ValueError(f"site: expected an integer of at most 255, got {site}")
    return torch.ops.ckptfused.dropout_mask(list(shape), p, rng_state, site)


def keep_scale(p: float) -> float:
    """What kept values are multiplied by: 65536 / (65536 − round(65536 p)), 0 when all is dropped."""
    return dropout.scale_of_kept(check_probability("p", p))
