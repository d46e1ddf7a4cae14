"""Tile sizes of the attention kernels: a pure function of shape and device, so that forward and its replay agree.

Nothing is timed at run time. tests/triton/test_compile.py compiles every entry for the devices below and holds it to
their limits (no spilled registers, shared memory, tensor-core instructions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STAGES = ("fwd", "dkdv", "dq")
BLOCK_D = (16, 32, 64, 128, 256)
# Bytes of shared memory that one block may use, by class of device.
SHARED = {"sm_90": 227 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10}


@dataclass(frozen=True)
class Config:
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int  # of the software pipeline: tiles in flight from memory


def device_class(capability: tuple[int, int]) -> str:
    """sm_90: 227 KiB of shared memory (data-centre chips since Hopper); sm_80: 163 KiB; sm_86: 99 KiB (the others)."""
    if capability[0] in (9, 10):
        return "sm_90"
    return "sm_80" if capability in ((8, 0), (8, 7)) else "sm_86"


def block_d(head_dim: int) -> int:
    """The power of two that a row is padded to, 16 at least (a tensor-core product's depth)."""
    return max(16, 1 << (head_dim - 1).bit_length())


# Half precision, by device class and stage: padded D -> Config without and with dropout (one: the same). Each is the
# largest tile of those tried that spills no register, with a pipeline that fits in shared memory. dkdv holds dk, dv and
# two tiles of scores at once, so its tiles are smaller than forward's; the draws of a dropout tile (four words a call,
# 64-bit products) take up to a hundred registers more. Eight warps: two warp groups of 64 rows each on sm_90.
# No GPU has timed them.
_HALF: dict[str, dict[str, dict[int, tuple[Config, ...]]]] = {
    "sm_90": {
        "fwd": {
            16: (Config(128, 128, 8, 3),),
            32: (Config(128, 128, 8, 3),),
            64: (Config(128, 64, 8, 3),),
            128: (Config(128, 64, 8, 3),),
            256: (Config(64, 32, 8, 2), Config(128, 32, 8, 2)),
        },
        "dkdv": {
            16: (Config(64, 128, 8, 2),),
            32: (Config(64, 128, 8, 2),),
            64: (Config(32, 128, 8, 2),),
            128: (Config(32, 128, 8, 2), Config(16, 128, 8, 2)),
            256: (Config(32, 32, 8, 2), Config(32, 32, 8, 1)),
        },
        "dq": {
            16: (Config(128, 64, 8, 2),),
            32: (Config(128, 64, 8, 2),),
            64: (Config(128, 64, 8, 2),),
            128: (Config(128, 64, 8, 2),),
            256: (Config(128, 32, 8, 2), Config(128, 16, 8, 2)),
        },
    },
    "sm_80": {
        "fwd": {
            16: (Config(128, 64, 4, 3),),
            32: (Config(128, 64, 4, 3), Config(128, 64, 8, 3)),
            64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3)),
            128: (Config(128, 64, 8, 3), Config(64, 64, 8, 3)),
            256: (Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
        },
        "dkdv": {
            16: (Config(64, 128, 8, 2),),
            32: (Config(64, 128, 8, 2),),
            64: (Config(32, 64, 8, 2),),
            128: (Config(64, 64, 8, 2), Config(16, 64, 8, 2)),
            256: (Config(32, 32, 8, 2),),
        },
        "dq": {
            16: (Config(128, 64, 8, 2),),
            32: (Config(128, 64, 8, 2),),
            64: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
            128: (Config(64, 64, 8, 2),),
            256: (Config(64, 32, 8, 2),),
        },
    },
    "sm_86": {
        "fwd": {
            16: (Config(128, 64, 8, 2),),
            32: (Config(128, 64, 8, 2),),
            64: (Config(128, 64, 8, 2),),
            128: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
            256: (Config(64, 32, 8, 2),),
        },
        "dkdv": {
            16: (Config(64, 64, 8, 2),),
            32: (Config(64, 64, 8, 2),),
            64: (Config(32, 64, 8, 2),),
            128: (Config(32, 64, 8, 2),),
            256: (Config(32, 32, 8, 2),),
        },
        "dq": {
            16: (Config(128, 64, 8, 2),),
            32: (Config(128, 64, 8, 2),),
            64: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
            128: (Config(64, 64, 8, 1),),
            256: (Config(64, 16, 8, 2),),
        },
    },
}


def attention_config(
    stage: str, dtype: torch.dtype, head_dim: int, dropout: bool, capability: tuple[int, int]
) -> Config:
    """The tile of a kernel."""
    d = block_d(head_dim)
    if dtype in (torch.bfloat16, torch.float16):
        return _HALF[device_class(capability)][stage][d][-1 if dropout else 0]
    # float32 and float64 are multiplied exactly, without tensor cores: rows are held in registers, and small tiles
    # spill least: up to D 128 at most two registers, at D 256 over a thousand bytes in float32.
    if dtype == torch.float64:
        return Config(16, 16, 4 if d <= 64 else 8, 1)
    if d > 64:
        return Config(16, 16, 8, 1)
    if stage == "dkdv" and d <= 32:
        return Config(32, 32, 4, 1)
    return Config(16, 32, 8, 1) if stage == "fwd" else Config(32, 32, 8, 1)
