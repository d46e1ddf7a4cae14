"""What a wrong result looks like: how far off it is as a whole, and where it is worst."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = (128, 128)
"""Rows and columns that a place is counted in, where the kernel says nothing else."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; NaN where there is a NaN."""
    wide = torch.float64 if found.dtype == torch.float64 else torch.float32
    expected = expected.to(wide)
    return float(torch.linalg.vector_norm(found.to(wide) - expected) / torch.linalg.vector_norm(expected))


def worst(found: Tensor, expected: Tensor, tile: tuple[int, int] = TILE) -> str:
    """The element that is furthest off, by index, row, column and tile, with both values, and where the others are.

    Rows are all dimensions but the last together. Off is what differs by more than a hundredth of the largest value
    expected, or is not finite where it should be.
    """
    columns = found.shape[-1] if found.dim() else 1
    got, right = (t.detach().to(torch.float64).reshape(-1, columns) for t in (found, expected))
    apart = (got - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    row, column = divmod(int(apart.argmax()), columns)
    scale = right.nan_to_num(0, 0, 0).abs().max()
    off = apart > scale / 100
    text = (
        f"worst at row {row} of {len(got)}, column {column} of {columns} (index "
        f"{_index(row, column, found)}; tile {row // tile[0]}, {column // tile[1]} of {tile[0]} x {tile[1]}, there at "
        f"{row % tile[0]}, {column % tile[1]}): got {float(got[row, column]):.6g}, right is "
        f"{float(right[row, column]):.6g}"
    )
    if not bool(off.any()):
        return f"{text}; no element is off by a hundredth of the largest"
    rows, cols = (off.any(dim).nonzero().flatten() for dim in (1, 0))
    nans = int(got.isnan().sum())
    return (
        f"{text}; {int(off.sum())} of {off.numel()} are off, in {len(rows)} rows from {int(rows[0])} to "
        f"{int(rows[-1])} and {len(cols)} columns from {int(cols[0])} to {int(cols[-1])}"
        + (f"; {nans} are NaN" if nans else "")
    )


def _index(row: int, column: int, like: Tensor) -> tuple[int, ...]:
    index = [column]
    for size in reversed(like.shape[:-1]):
        row, here = divmod(row, size)
        index.insert(0, here)
    return tuple(index[: max(like.dim(), 1)])


def expect_close(name: str, found: Tensor, expected: Tensor, limit: float, tile: tuple[int, int] = TILE) -> float:
    """Raises unless found is within limit of expected, by norm. No time is reported after that."""
    error = relative_error(found, expected)
    if not error <= limit:
        raise SystemExit(
            f"{name}: wrong result, no time reported: relative error {error:.3g}, allowed {limit:.3g}; "
            f"{worst(found, expected, tile)}"
        )
    return error
