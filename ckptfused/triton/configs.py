"""Tile sizes of the attention kernels: a pure function of shape, options and device, so that forward and its replay
agree.

The table is tiles.json: for each class of device (`device_class`), and one tile a kernel and width for every other
device. Nothing is timed at run time. tests/triton/test_compile.py compiles the entries for each class and holds them
to their limits (no spilled registers, shared memory, tensor-core instructions).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

STAGES = ("fwd", "dkdv", "dq")
OPTION_CLASSES = ("none", "some", "mask", "wide mask")
BLOCK_D = (16, 32, 64, 128, 256)
GENERIC = "generic"
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("tiles.json").read_text(encoding="utf-8"))
# Bytes of shared memory that one block may use, by class of device.
SHARED = {device: entry["shared_kib"] << 10 for device, entry in TABLE.items()}
# Whose cell serves a class, where it has none of its own.
_SERVES = {name: (name, *("mask",) * (name == "wide mask"), "none") for name in OPTION_CLASSES}
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
    """sm_80: A100, Orin; sm_90: Hopper; sm_100: data-centre Blackwell; sm_120: other Blackwells; generic: the rest."""
    if capability[0] == 8:
        return "sm_80" if capability[1] in (0, 7) else GENERIC
    name = f"sm_{capability[0]}0"
    return name if name in TABLE else GENERIC


def block_d(head_dim: int) -> int:
    """The power of two that a row is padded to, 16 at least (a tensor-core product's depth)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def delta_config(head_dim: int) -> Config:
    """The configuration of the kernel that makes each row's shift and delta, whatever the type and the device: it
    multiplies nothing and reads once, 32 numbers a thread of do and of o."""
    return Config(min(64, 4096 // block_d(head_dim)), 0, warps=4, stages=1, registers=_ALL_REGISTERS)


# Of half precision the table has, by class of device, stage and class of options, a cell for each padded D: queries x
# keys of a tile / tiles in flight, "w4" where four warps make it, else eight (two warp groups of 64 rows each on
# sm_90), "r" with all registers; behind a bar the tile with dropout, where it is another. Where there is no cell, that
# of "none" serves, of "wide mask" that of "mask". Of a class each is the largest of those tried that spills no register
# in its loops, with a pipeline that fits in shared memory; on sm_90 that with the fewest instructions an element: 128
# rows (dkdv: keys) are twice as good as 64 there, since eight warps are two groups of 64 rows; generic ones are those
# that fit the most demanding kernel. sm_100 multiplies in tensor memory, 128 or 64 rows (dkdv: keys) at a time; fewer
# go the way of sm_80, as dkdv does for D = 256. For D = 128 it rather has no pipeline there, whose addresses take the
# registers. sm_120 has neither that memory nor sm_90's instructions. dkdv holds dk, dv and two tiles of scores at once,
# so its tiles are smaller than forward's; the draws of a dropout tile (four words a call, 64-bit products) take up to a
# hundred registers more. A mask tensor that is not aligned (packed sequences begin anywhere) is read an element at a
# time, and costs forward the most. "mask" are also the tiles of a head narrower than its padded D, whose loads have
# masks of their own. No GPU has timed them but D = 128 with dropout on sm_90: 320 TFLOP/s forward, and 183 backward
# with 16 queries in dkdv's tile, which now has 32.


def _config(cell: str) -> Config:
    """The tile that a cell says."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d)(w4)?(r)?", cell)
    assert found is not None, cell
    m, n, stages = map(int, found.groups()[:3])
    return Config(m, n, 4 if found[4] else 8, stages, registers=_ALL_REGISTERS if found[5] else None)


@cache
def _half(device: str, stage: str, options: str, d: int, dropout: bool) -> Config:
    """The tile of half precision."""
    rows = TABLE[device]["attention"][stage]
    column = BLOCK_D.index(d)
    cells = (rows[name][column] for name in _SERVES[options] if name in rows)
    return _config(next(filter(None, cells)).split("|")[-1 if dropout else 0])


# float32 and float64 are multiplied exactly. Without tensor cores, which have no float32 and on most devices no
# float64, a thread holds the rows that it multiplies, of a wide head a piece at a time. (Left: in float64 dk and dv of
# heads 256 wide spill some bytes, whatever the piece: up to 176 on sm_100, 96 on sm_120, and on generic devices with
# options but no dropout.)
def _piece(stage: str, dtype: torch.dtype, d: int, dropout: bool, device: str) -> int:
    if d <= 64:
        return 0
    if dtype == torch.float64 and d == 256:
        if device == "sm_80":
            return 32 if stage == "dkdv" and dropout else 128
        if device in ("sm_100", "sm_120") and stage == "dkdv":
            return 128
    return 64


def option_class(window: bool, softcap: bool, mask: bool, padding: bool, packed: bool, wide: bool = False) -> str:
    """What of a call's options decides its tiles: a name in OPTION_CLASSES. wide: of a mask with more bytes an element
    than q has, as under autocast; its tiles in flight take as many more."""
    if mask:
        return "wide mask" if wide else "mask"
    return "some" if window or softcap or padding or packed else "none"


def attention_config(
    stage: str, dtype: torch.dtype, head_dim: int, dropout: bool, capability: tuple[int, int], options: str = "none"
) -> Config:
    """The tile of a kernel. options: as option_class says."""
    d = block_d(head_dim)
    device = device_class(capability)
    if dtype in (torch.bfloat16, torch.float16):
        if head_dim < d and options != "wide mask":
            options = "mask"
        return _half(device, stage, options, d, dropout)
    if dtype == torch.float64 or d > 64 or options != "none":
        return Config(16, 16, 8, 1, _piece(stage, dtype, d, dropout, device), _ALL_REGISTERS)
    if stage == "dkdv" and d <= 32 and device not in ("sm_100", "sm_120"):
        return Config(32, 32, 4, 1, registers=_ALL_REGISTERS)
    return Config(16, 32, 8, 1) if stage == "fwd" else Config(32, 32, 8, 1)
