"""Philox4x32 and the dropout masks made from it, slowly and in the open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np  # imported where it is used: the rest of the oracle does without

ROUNDS = 7
DECISIONS = 65536  # 16 bits decide an element
LANES = 8  # decisions a Philox call

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: Sequence[Any], key: Sequence[Any], rounds: int = ROUNDS) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words from a counter of four words and a key of two.

    Words are Python ints or ``uint64`` arrays holding 32-bit values; both go through the same lines.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _LOW, (product0 >> 32) ^ c3 ^ k1, product0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_threshold(p: float) -> int:
    """The number t of the 65536 16-bit values that drop an element: ``p * 65536`` rounded half to even."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p: expected a probability in [0, 1], got {p}")
    return round(p * DECISIONS)


def decisions(rows: int, cols: int, seed: int, offset: int, site: int) -> np.ndarray:
    """The 16-bit numbers that decide each element of a [rows, cols] tensor.

    **Shapes**: returns ``uint64`` [rows, cols], values in [0, 65536).

    **Source**: docs/how-it-works.md, "Random numbers": element ``e = row * 8 * ceil(cols / 8) + col``, counter words
    0-1 ``e >> 3``, word 2 the offset's low half, word 3 its next 24 bits and the site; lane ``e & 7`` takes half a
    word.
    """
    import numpy as np

    seed, offset = seed & (2**64 - 1), offset & (2**64 - 1)
    stride = -(-cols // LANES) * LANES
    e = np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(stride) + np.arange(cols, dtype=np.uint64)[None, :]
    call = e >> np.uint64(3)
    word2 = np.full_like(e, offset & _LOW)
    word3 = np.full_like(e, (offset >> 32 & 0xFFFFFF) | site << 24)
    words = philox4x32((call & np.uint64(_LOW), call >> np.uint64(32), word2, word3), (seed & _LOW, seed >> 32))
    lane = e & np.uint64(LANES - 1)
    word = np.choose((lane >> np.uint64(1)).astype(np.int64), words)
    return (word >> (np.uint64(16) * (lane & np.uint64(1)))) & np.uint64(0xFFFF)


def philox_mask(shape: Sequence[int], p: float, seed: int, offset: int, site: int) -> Tensor:
    """The keep mask of a whole dropout tensor in batch-first order.

    **Shapes**: returns bool ``shape``; all dimensions but the last count as rows.
    """
    import numpy as np

    *lead, cols = shape
    rows = int(np.prod(lead, dtype=np.int64))
    keep = decisions(rows, cols, seed, offset, site) >= np.uint64(keep_threshold(p))
    return torch.from_numpy(np.ascontiguousarray(keep).reshape(tuple(shape)))
