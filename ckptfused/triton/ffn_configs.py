"""Tiles that the FFN kernels may use, by class of device. Which one a shape uses, if any: tuning.py.

One entry serves forward and backward, so that the replayed gate and up products have the bits of forward's.
tests/triton/test_ffn_compile.py compiles every entry for the devices below and holds it to their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .configs import device_class

DTYPES = (torch.bfloat16, torch.float16)


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


# The first of a list is what CKPTFUSED_FFN=triton takes for a shape that nobody has measured. No GPU has ordered these.
CANDIDATES: dict[str, tuple[FFNConfig, ...]] = {
    "sm_90": (
        FFNConfig(128, 128, 64, 8, 4),
        FFNConfig(128, 128, 64, 8, 3),
        FFNConfig(128, 64, 64, 4, 3),  # two blocks an SM: one's epilogue runs beside the other's products
        FFNConfig(64, 128, 64, 4, 2),  # likewise
    ),
    "sm_80": (
        FFNConfig(128, 64, 32, 8, 4),
        FFNConfig(128, 64, 64, 8, 3),
        FFNConfig(128, 64, 32, 4, 3),
        FFNConfig(64, 64, 32, 4, 4),
    ),
    "sm_86": (
        FFNConfig(128, 64, 32, 8, 3),
        FFNConfig(64, 64, 32, 4, 3),
    ),
}

# Of CPU tensors: large enough for the interpreter, small enough for tests to see several of them.
INTERPRETED = FFNConfig(32, 32, 32, 4, 1, 2)


def candidates(capability: tuple[int, int]) -> tuple[FFNConfig, ...]:
    return CANDIDATES[device_class(capability)] if capability >= (8, 0) else ()


def find_config(name: str, capability: tuple[int, int]) -> FFNConfig | None:
    return next((c for c in candidates(capability) if c.name == name), None)
