"""Tiles that the FFN kernels may use, by class of device. Which one a shape uses, if any: tuning.py.

One entry serves forward and backward, so that the replayed gate and up products have the bits of forward's.
tests/triton/test_ffn_compile.py compiles every entry for the devices below and holds it to their limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ckptfused.triton.configs import TABLE, device_class

HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FFNConfig:
    block_m: int  # rows of a tile
    block_n: int  # hidden columns of a tile: as many of gate and of up
    block_k: int
    warps: int
    stages: int  # of the software pipeline: tiles in flight from memory
    group_m: int = 8  # row tiles that go together over the columns (ffn_kernels.tile_of)

    @property
    def name(self) -> str:
        return f"m{self.block_m}n{self.block_n}k{self.block_k}w{self.warps}s{self.stages}"


def _config(name: str) -> FFNConfig:
    """The tile of that name."""
    found = re.fullmatch(r"m(\d+)n(\d+)k(\d+)w(\d+)s(\d+)", name)
    assert found is not None, name
    return FFNConfig(*map(int, found.groups()))


# In tiles.json, by name. The first of a list is what CKPTFUSED_FFN=triton takes for a shape that nobody has measured;
# those of four warps leave room for two blocks an SM: one's epilogue runs beside the other's products. No GPU has
# ordered them. Whether these kernels stay at all is decided where the first GPU has timed them (docs/gpu.md).
CANDIDATES = {device: tuple(map(_config, entry["ffn"])) for device, entry in TABLE.items()}

# Of CPU tensors: large enough for the interpreter, small enough for tests to see several of them.
INTERPRETED_FFN = FFNConfig(32, 32, 32, 4, 1, 2)


def candidates(capability: tuple[int, int]) -> tuple[FFNConfig, ...]:
    return CANDIDATES[device_class(capability)] if capability >= (8, 0) else ()


def find_config(name: str, capability: tuple[int, int]) -> FFNConfig | None:
    return next((c for c in candidates(capability) if c.name == name), None)
