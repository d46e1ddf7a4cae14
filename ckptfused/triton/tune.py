"""The measurement that fills the user's table of FFN kernels: `python -m ckptfused tune`."""

from __future__ import annotations

from typing import Any

import torch

from ckptfused.triton.ffn.configs import HALF_DTYPES, candidates

from . import tuning


def tune_ffn(n: int, c: int, f: int, act: str, dtype: torch.dtype, rounds: int = 21) -> dict[str, Any]:
    """Measures cuBLAS and every tile on the current GPU, writes the user's table and returns the entry.

    Measured are an FFN half's own ops, on four paths: forward and the replaying backward of a block that does not keep
    gu, forward and backward of one that does. Triton is chosen only where one tile is faster than cuBLAS on each of
    them. Gate and up are one joint weight, without norm, biases and dropout, in the layout of ``nn.Linear``; other
    blocks of the shape share the choice.

    Every tile is checked first, against float64 and for the same bits on every path, and left out with a warning where
    it is wrong. The choice holds from the next process on; in this one after ``reload()``, not to be called between a
    forward and its backward.
    """
    if dtype not in HALF_DTYPES:
        raise ValueError(f"dtype: expected bfloat16 or float16, got {dtype}")
    if not torch.cuda.is_available() or (device := tuning._device("cuda")) is None:
        raise RuntimeError("expected an NVIDIA GPU, whose kernels are timed, got a machine where PyTorch finds none")
    from ckptfused.triton.ffn.measure import measure  # late: it needs Triton

    entry = measure(n, c, f, act, dtype, candidates(device.capability), rounds)
    tuning.save(tuning.shape_key(n, c, f, act, dtype, device), entry)
    return entry
