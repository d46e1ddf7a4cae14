"""Tile sizes of the attention kernels: a pure function of shape, options and device, so that forward and its replay
agree.

Nothing is timed at run time. tests/triton/test_compile.py compiles the entries for the devices below and holds them to
their limits (no spilled registers, shared memory, tensor-core instructions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
            32: (Config(128, 32, 8, 2), Config(128, 64, 8, 2)),
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

# By class of options, only where they make the tile above spill. A mask tensor that is not aligned (packed sequences
# begin anywhere) is read an element at a time, and costs forward the most. "mask" are also the tiles of a head narrower
# than its padded D, whose loads have masks of their own; on sm_80 with all registers.
_OPTIONS: dict[str, dict[str, dict[str, dict[int, tuple[Config, ...]]]]] = {
    "some": {
        "sm_90": {
            "fwd": {
                16: (Config(128, 128, 8, 3), Config(64, 64, 8, 3)),
                32: (Config(64, 128, 8, 3), Config(64, 64, 8, 3)),
            },
            "dkdv": {
                32: (Config(64, 128, 8, 2), Config(64, 64, 8, 2)),
                128: (Config(32, 64, 8, 2), Config(16, 128, 8, 2)),
            },
            "dq": {
                128: (Config(128, 32, 8, 2), Config(64, 64, 8, 2)),
                256: (Config(128, 16, 8, 2),),
            },
        },
        "sm_80": {
            "fwd": {
                16: (Config(64, 32, 4, 3), Config(128, 64, 4, 3)),
                32: (Config(128, 32, 8, 3), Config(128, 64, 8, 3)),
                64: (Config(128, 64, 8, 3), Config(64, 64, 8, 3)),
                128: (Config(64, 32, 4, 3), Config(64, 64, 8, 3)),
                256: (Config(64, 32, 8, 2),),
            },
            "dkdv": {
                16: (Config(32, 128, 8, 2),),
                32: (Config(64, 32, 8, 2), Config(32, 128, 8, 2)),
                64: (Config(32, 64, 8, 1), Config(32, 32, 8, 2)),
            },
            "dq": {
                16: (Config(64, 32, 4, 2), Config(128, 64, 8, 2)),
                32: (Config(128, 64, 8, 2),),
                64: (Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
                256: (Config(64, 32, 8, 2), Config(64, 16, 8, 2)),
            },
        },
        "sm_86": {
            "fwd": {
                64: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
                128: (Config(64, 64, 8, 2),),
            },
            "dkdv": {
                16: (Config(64, 64, 8, 2), Config(32, 128, 8, 2)),
                32: (Config(32, 128, 8, 2),),
                128: (Config(32, 64, 8, 2), Config(16, 64, 8, 2)),
            },
            "dq": {
                64: (Config(64, 64, 8, 2),),
            },
        },
    },
    "mask": {
        "sm_90": {
            "fwd": {
                16: (Config(64, 64, 8, 3), Config(128, 32, 8, 3)),
                32: (Config(64, 64, 8, 3), Config(128, 32, 8, 3)),
                64: (Config(128, 64, 8, 3), Config(64, 64, 8, 3)),
                128: (Config(64, 32, 8, 3),),
                256: (Config(128, 16, 8, 2),),
            },
            "dkdv": {
                16: (Config(64, 128, 8, 2), Config(32, 128, 8, 2)),
                32: (Config(32, 128, 8, 2),),
                64: (Config(32, 128, 8, 2), Config(32, 64, 8, 2)),
                128: (Config(64, 16, 8, 2), Config(16, 64, 8, 2)),
                256: (Config(16, 32, 8, 2, registers=_ALL_REGISTERS), Config(16, 32, 8, 1)),
            },
            "dq": {
                16: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
                32: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
                64: (Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
                128: (Config(128, 32, 8, 2),),
                256: (Config(128, 16, 8, 2),),
            },
        },
        "sm_80": {
            "fwd": {
                16: (Config(64, 64, 8, 3), Config(128, 32, 8, 3)),
                32: (Config(64, 32, 8, 3), Config(128, 16, 8, 3)),
                64: (Config(64, 64, 8, 3),),
                128: (Config(32, 64, 8, 3),),
                256: (Config(32, 32, 8, 2), Config(64, 16, 8, 2)),
            },
            "dkdv": {
                16: (Config(32, 128, 8, 2), Config(16, 128, 8, 2)),
                32: (Config(128, 16, 8, 2), Config(16, 128, 8, 2)),
                64: (Config(32, 16, 4, 2), Config(16, 64, 8, 2)),
                128: (Config(64, 32, 8, 2), Config(16, 32, 8, 2)),
                256: (Config(32, 32, 8, 2), Config(16, 16, 8, 2)),
            },
            "dq": {
                16: (Config(32, 64, 8, 2), Config(128, 32, 8, 2)),
                32: (Config(128, 32, 8, 2),),
                64: (Config(128, 16, 8, 2), Config(64, 32, 8, 2)),
                128: (Config(32, 32, 8, 2),),
                256: (Config(16, 16, 8, 2), Config(32, 16, 8, 2)),
            },
        },
        "sm_86": {
            "fwd": {
                16: (Config(64, 64, 8, 2), Config(128, 32, 8, 2)),
                32: (Config(128, 32, 8, 2),),
                64: (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
                128: (Config(64, 32, 8, 2),),
                256: (Config(32, 64, 8, 2), Config(64, 16, 8, 2)),
            },
            "dkdv": {
                16: (Config(32, 128, 8, 2),),
                32: (Config(32, 128, 8, 2),),
                64: (Config(32, 64, 8, 2), Config(16, 64, 8, 2)),
                128: (Config(64, 32, 8, 2), Config(16, 32, 8, 2)),
                256: (Config(32, 32, 8, 2), Config(16, 32, 8, 2)),
            },
            "dq": {
                16: (Config(64, 64, 8, 2), Config(128, 32, 8, 2)),
                32: (Config(128, 32, 8, 2),),
                64: (Config(128, 32, 8, 2), Config(64, 32, 8, 2)),
                128: (Config(64, 16, 8, 1), Config(64, 32, 8, 1)),
                256: (Config(32, 16, 8, 2), Config(64, 16, 8, 2)),
            },
        },
    },
}


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
        entry = _HALF[device][stage][d]
        if head_dim < d:
            options = "mask"
        if options != "none":
            entry = _OPTIONS[options][device][stage].get(d, entry)
        config = entry[-1 if dropout else 0]
        return replace(config, registers=_ALL_REGISTERS) if options == "mask" and device == "sm_80" else config
    if dtype == torch.float64 or d > 64 or options != "none":
        return Config(16, 16, 8, 1, _piece(stage, dtype, d, dropout, device), _ALL_REGISTERS)
    if stage == "dkdv" and d <= 32:
        return Config(32, 32, 4, 1, registers=_ALL_REGISTERS)
    return Config(16, 32, 8, 1) if stage == "fwd" else Config(32, 32, 8, 1)
