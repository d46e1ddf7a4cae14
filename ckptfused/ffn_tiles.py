"""How the FFN half is cut where its hidden-wide scratch would be more than a block takes."""

from __future__ import annotations

from ckptfused._extension import _C

Tile = tuple[int, int, int, int]  # first row, rows, first column, columns


def ffn_tiles(
    rows: int, width: int, hidden: int, gated: bool, element_size: int, scratch: int = 0, device: str = "cpu"
) -> tuple[int, int]:
    """Rows and hidden columns of a tile of the FFN half: csrc/block/tiles.h, which says why.

    scratch: the bytes above which it is cut; 0: the default of `device`, 256 MiB on "cpu", 1.5 GiB on "cuda".
    """
    cuda = device == "cuda"
    return _C.ffn_tiles(rows, width, hidden, gated, element_size, _C.scratch_limit(scratch, cuda), cuda)


def cut(rows: int, hidden: int, step: tuple[int, int]) -> list[Tile]:
    """The tiles of a call, in order (Block::tiles)."""
    if rows == 0:
        return [(0, 0, 0, hidden)]
    return [
        (row, min(step[0], rows - row), col, min(step[1], hidden - col))
        for row in range(0, rows, step[0])
        for col in range(0, hidden, step[1])
    ]
