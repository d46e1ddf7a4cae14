"""Tile sizes of the attention kernels: a pure function of shape, options and device, so that forward and its replay
agree.

Nothing is timed at run time. tests/triton/test_compile.py compiles the entries for the devices below and holds them to
their limits (no spilled registers, shared memory, tensor-core instructions).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import torch

STAGES = ("fwd", "dkdv", "dq")
OPTION_CLASSES = ("none", "some", "mask")
BLOCK_D = (16, 32, 64, 128, 256)
# Bytes of shared memory that one block may use, by class of device.
SHARED = {"sm_90": 227 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10}
_ALL_REGISTERS = 255


@dataclass(frozen=True)
class Config:
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int  # of the software pipeline: tiles in flight from memory
    piece: int = 0  # columns of q·k and do·v that are multiplied at a time; 0: all
    registers: int | None = None  # a thread's; None: ptxas may spill a few to fit two blocks where there was one


def device_class(capability: tuple[int, int]) -> str:
    """sm_90: 227 KiB of shared memory (data-centre chips since Hopper); sm_80: 163 KiB; sm_86: 99 KiB (the others)."""
    if capability[0] in (9, 10):
        return "sm_90"
    return "sm_80" if capability in ((8, 0), (8, 7)) else "sm_86"


def block_d(head_dim: int) -> int:
    """The power of two that a row is padded to, 16 at least (a tensor-core product's depth)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def delta_config(head_dim: int) -> Config:
    """Of the kernel that makes each row's shift and delta, whatever the type and the device: it multiplies nothing and
    reads once, 32 numbers a thread of do and of o."""
    return Config(min(64, 4096 // block_d(head_dim)), 0, warps=4, stages=1)


# Half precision, by class of device, stage and class of options, a cell for each padded D: queries x keys of a tile /
# tiles in flight, "w4" where four warps make it, else eight (two warp groups of 64 rows each on sm_90), "r" with all
# registers; behind a bar the tile with dropout, where it is another; "-" is the cell of "none". Each is the largest of
# those tried that spills no register, with a pipeline that fits in shared memory. dkdv holds dk, dv and two tiles of
# scores at once, so its tiles are smaller than forward's; the draws of a dropout tile (four words a call, 64-bit
# products) take up to a hundred registers more. A mask tensor that is not aligned (packed sequences begin anywhere) is
# read an element at a time, and costs forward the most. "mask" are also the tiles of a head narrower than its padded D,
# whose loads have masks of their own; on sm_80 with all registers. No GPU has timed them.
_HALF = """
device stage options D16                  D32                 D64                  D128              D256
sm_90  fwd   none    128x128/3            128x128/3           128x64/3             128x64/3          64x32/2|128x32/2
sm_90  fwd   some    128x128/3|64x64/3    64x128/3|64x64/3    -                    -                 -
sm_90  fwd   mask    64x64/3|128x32/3     64x64/3|128x32/3    128x64/3|64x64/3     64x32/3           128x16/2
sm_90  dkdv  none    64x128/2|32x128/2   64x128/2|32x128/2   32x128/2             32x128/2|16x128/2 32x32/2|64x32/1
sm_90  dkdv  some    -                    64x128/2|64x64/2    -                    32x64/2|16x128/2  -
sm_90  dkdv  mask    64x128/2|32x128/2    32x128/2            32x128/2|32x64/2     64x16/2|16x64/2   16x32/2r|16x32/1
sm_90  dq    none    128x64/2             128x64/2            128x64/2             128x64/2          128x32/2|128x16/2
sm_90  dq    some    -                    -                   -                    128x32/2|64x64/2  128x16/2
sm_90  dq    mask    128x64/2|64x64/2     128x64/2|64x64/2    128x64/2|128x32/2    128x32/2          128x16/2
sm_80  fwd   none    128x64/3w4          128x64/3w4|128x64/3 128x64/3w4|128x64/3  128x64/3|128x32/3 64x64/2|64x32/2
sm_80  fwd   some    64x32/3w4|128x64/3w4 128x32/3|128x64/3   128x64/3|64x64/3     64x32/3w4|64x64/3 64x32/2
sm_80  fwd   mask    64x64/3|128x32/3     64x32/3|128x16/3    64x64/3              32x64/3           32x32/2|32x32/2
sm_80  dkdv  none    64x128/2|32x128/2r  64x128/2|16x128/2r  32x64/2|64x32/2      64x64/2|64x32/2   32x32/2
sm_80  dkdv  some    32x128/2            64x32/2|16x128/2r   32x64/1|64x32/2      -                 -
sm_80  dkdv  mask    32x128/2|16x128/2    128x16/2|16x128/2   32x16/2w4|16x64/2    64x32/2|16x32/2   32x32/2|16x16/2
sm_80  dq    none    128x64/2            128x32/2|128x64/2   128x64/2             64x64/2           64x32/2|64x32/1
sm_80  dq    some    64x32/2w4|128x64/2   128x64/2            64x64/2|64x32/2      -                 64x32/2|64x16/2
sm_80  dq    mask    32x64/2|128x32/2     128x32/2            128x16/2|64x32/2     32x32/2           16x16/2|32x16/2
sm_86  fwd   none    128x64/2             128x64/2            128x64/2             128x64/2|64x64/2  64x32/2
sm_86  fwd   some    -                    -                   128x64/2|64x64/2     64x64/2           -
sm_86  fwd   mask    64x64/2|128x32/2     128x32/2            128x64/2|64x64/2     64x32/2           32x64/2|64x16/2
sm_86  dkdv  none    64x64/2             64x64/2|16x128/2r   32x64/2|32x32/2      32x64/2           32x32/2|16x16/2
sm_86  dkdv  some    64x64/2|32x128/2    32x128/2            -                    32x64/2|32x32/2   -
sm_86  dkdv  mask    32x128/2             32x128/2            32x64/2|16x64/2      64x32/2|16x32/2   32x32/2|16x32/2
sm_86  dq    none    128x64/2            128x64/2            128x64/2|64x64/2     64x64/1           64x16/2|64x16/1
sm_86  dq    some    -                    -                   64x64/2              -                 -
sm_86  dq    mask    64x64/2|128x32/2     128x32/2            128x32/2|64x32/2     64x16/1|64x32/1   32x16/2|64x16/2
"""


def _config(cell: str) -> Config:
    """The tile that a cell says."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d)(w4)?(r)?", cell)
    assert found is not None, cell
    m, n, stages = map(int, found.groups()[:3])
    return Config(m, n, 4 if found[4] else 8, stages, registers=_ALL_REGISTERS if found[5] else None)


@cache
def _half(device: str, stage: str, options: str, d: int, dropout: bool) -> Config:
    """The tile of half precision."""
    rows = {tuple(row[:3]): row[3:] for row in map(str.split, _HALF.strip().splitlines())}
    cell = rows[device, stage, options][BLOCK_D.index(d)]
    if cell == "-":
        return _half(device, stage, "none", d, dropout)
    return _config(cell.split("|")[-1 if dropout else 0])


# float32 and float64 are multiplied exactly. Without tensor cores, which have no float32 and on sm_86 no float64, a
# thread holds the rows that it multiplies, of a wide head a piece at a time. (Left: in float64 on sm_86, dk and dv of
# heads 256 wide, with options but no dropout, spill 24 to 424 bytes, whatever the piece.)
def _piece(stage: str, dtype: torch.dtype, d: int, dropout: bool, device: str) -> int:
    if d <= 64:
        return 0
    if dtype == torch.float64 and d == 256:
        if device == "sm_80":
            return 32 if stage == "dkdv" and dropout else 128
        if device == "sm_86" and stage == "dkdv":
            return 128
    return 64


def option_class(window: bool, softcap: bool, mask: bool, padding: bool, packed: bool) -> str:
    """What of a call's options decides its tiles: a name in OPTION_CLASSES."""
    return "mask" if mask else "some" if window or softcap or padding or packed else "none"


def attention_config(
    stage: str, dtype: torch.dtype, head_dim: int, dropout: bool, capability: tuple[int, int], options: str = "none"
) -> Config:
    """The tile of a kernel. options: as option_class says."""
    d = block_d(head_dim)
    device = device_class(capability)
    if dtype in (torch.bfloat16, torch.float16):
        if head_dim < d:
            options = "mask"
        config = _half(device, stage, options, d, dropout)
        return replace(config, registers=_ALL_REGISTERS) if options == "mask" and device == "sm_80" else config
    if dtype == torch.float64 or d > 64 or options != "none":
        return Config(16, 16, 8, 1, _piece(stage, dtype, d, dropout, device), _ALL_REGISTERS)
    if stage == "dkdv" and d <= 32:
        return Config(32, 32, 4, 1, registers=_ALL_REGISTERS)
    return Config(16, 32, 8, 1) if stage == "fwd" else Config(32, 32, 8, 1)
