"""The attention kernels compiled ahead of time for their real tiles: what a GPU will run, without one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and does not compile", allow_module_level=True)

import triton

from ckptfused.triton import configs
from tests.triton.compiling import CAPABILITIES, Kernel, compile_kernel


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


# Bytes. The tiles were chosen with Triton 3.6, torch 2.11's; 3.7.1 spills two to six registers in five of these,
# at most 56 bytes stored and loaded.
SPILL = 0 if triton.__version__.startswith("3.6.") else 64


def check(k: Kernel) -> None:
    r = compile_kernel(k)
    said = f"{k.config}: {r.registers} registers, {r.spilled} bytes spilled, stack {r.stack}, shared {r.shared}"
    assert r.shared <= configs.SHARED[k.device], said
    assert r.spilled <= SPILL and r.stack <= SPILL, said
    if k.dtype.itemsize == 2:
        assert "wgmma.mma_async" in r.ptx or "mma.sync" in r.ptx, said
    assert not re.search(r"^\s*(@%p\d+ )?(atom|red)\.", r.ptx, re.MULTILINE)


TABLE = [
    Kernel(device, stage, d, dropout=dropout)
    for device in CAPABILITIES
    for stage in configs.STAGES
    for d in configs.BLOCK_D
    for dropout in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", TABLE, ids=lambda k: k.id)
def test_half_precision(kernel: Kernel) -> None:
    check(kernel)


@pytest.mark.parametrize("stage", configs.STAGES)
@pytest.mark.parametrize("device", ["sm_90", "sm_80"])
def test_matrix_instructions(device: str, stage: str) -> None:
    k = Kernel(device, stage, 128, dtype=torch.float16, dropout=True, causal=False)
    check(k)
    ptx = compile_kernel(k).ptx
    assert ("wgmma.mma_async" in ptx) == (device == "sm_90")


# Where masks, window, cap and packing come together, registers may spill: such calls are bound by the masks' memory.
@pytest.mark.slow
@pytest.mark.parametrize("stage", configs.STAGES)
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
def test_every_option_compiles(stage: str, head_dim: int) -> None:
    k = Kernel("sm_90", stage, head_dim, dropout=True, everything=True)
    r = compile_kernel(k)
    assert r.shared <= configs.SHARED[k.device]


@pytest.mark.slow
@pytest.mark.parametrize("stage", configs.STAGES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_types_compile(stage: str, head_dim: int, dtype: torch.dtype) -> None:
    for device in ("sm_90", "sm_80"):
        k = Kernel(device, stage, head_dim, dtype=dtype, dropout=True)
        r = compile_kernel(k)
        assert r.shared <= configs.SHARED[device]
        assert "tf32" not in r.ptx
        # Two registers stored and loaded; rows of 256 do not fit, and are left to this and no other tile.
        assert r.spilled <= SPILL + 16 or head_dim == 256


@pytest.mark.slow
@pytest.mark.parametrize("stage", configs.STAGES)
def test_float64_with_masks_compiles(stage: str) -> None:
    """What float64 reads beside its products has eight bytes an element, or Triton 3.6 refuses."""
    compile_kernel(Kernel("sm_90", stage, 16, dtype=torch.float64, everything=True))


def test_a_tile_too_large_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test."""
    monkeypatch.setattr(configs, "attention_config", lambda *_: configs.Config(128, 128, 4, 2))
    with pytest.raises(AssertionError, match="bytes spilled"):
        check(Kernel("sm_90", "dkdv", 128, dropout=True))
