"""The attention kernels compiled ahead of time for their real tiles: what a GPU will run, without one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and does not compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptfused.triton import configs, launch, philox, records
from ckptfused.triton.problem import make_problem
from tests.triton.compiling import (
    CAPABILITIES,
    NARROW,
    OPTIONS,
    TENSOR_MEMORY,
    TYPES,
    Kernel,
    Result,
    compile_kernel,
    delta_kernels,
    parameters,
    ptxas,
)
from tests.triton.sass import disassemble, loops


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


# Bytes. The tiles were chosen with Triton 3.6, torch 2.11's. 3.7.1 spills two to six registers in five plain kernels,
# at most 56 bytes stored and loaded; the others it has not been asked about.
THIS_TRITON = triton.__version__.startswith("3.6.")
SPILL = 0 if THIS_TRITON else 64
# The widest dk and dv in float64 hold more there than there are registers, in every tile that was tried.
LEFT = {(device, "dkdv", 256, torch.float64): spilled for device, spilled in (("sm_100", 176), ("sm_120", 96))}


def spills_outside_its_loops(r: Result) -> bool:
    """A few registers, stored and loaded once for a tile of keys or queries: one in 200 of a loop's instructions."""
    found = loops(disassemble(r.cubin))
    return r.spilled <= 256 and all(200 * loop.count("LDL", "STL") <= loop.count() for loop in found)


def check(k: Kernel) -> None:
    r = compile_kernel(k)
    said = f"{k.config}: {r.registers} registers, {r.spilled} bytes spilled, stack {r.stack}, shared {r.shared}"
    assert r.shared <= configs.SHARED[k.device] and r.tensor_memory <= TENSOR_MEMORY, said
    if THIS_TRITON or not (k.options or k.config.registers):
        allowed = LEFT.get((k.device, k.stage, k.head_dim, k.dtype), SPILL)
        assert max(r.spilled, r.stack) <= allowed or spills_outside_its_loops(r), said
    if k.dtype == torch.float32:
        assert "tf32" not in r.ptx and "mma" not in r.ptx, said
    if k.dtype.itemsize == 2 and k.stage != "delta":
        assert any(name in r.ptx for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync")), said
    assert not re.search(r"^\s*(@%p\d+ )?(atom|red)\.", r.ptx, re.MULTILINE)
    assert records.layout(r.signature) == parameters(r.cubin), "what C++ launches has other parameters"


# Compiled in every run, of the tables below: each kernel in each type, the widest heads, every option, heads that leave
# a part of their row; a tile of each class and stage is test_matrix_instructions'. The rest guards tiles that no GPU
# has timed; `make test-all` compiles it.
ALWAYS = {
    *(f"sm_90-{stage}-D256-bf16-dropout" for stage in configs.STAGES),
    *(f"sm_80-{stage}-D256-bf16-dropout-full" for stage in configs.STAGES),
    "generic-fwd-D64-bf16-dropout-everything",
    "generic-dkdv-D64-bf16-everything",
    "generic-dq-D256-bf16-dropout-everything",
    "sm_90-fwd-D192-bf16-dropout-window-mask-packed",
    "sm_90-dkdv-D96-bf16-dropout-everything-mask=drop-padding=drop",
    "sm_90-dq-D192-bf16-dropout-window-softcap-padding-packed-padding=drop",
    "sm_80-dq-D192-bf16-dropout-softcap-packed-full",
    *(f"sm_90-{stage}-D256-{dtype}-dropout-everything" for stage in ("fwd", "dkdv") for dtype in ("fp32", "fp64")),
    *(f"sm_80-dq-D256-{dtype}-dropout-everything" for dtype in ("fp32", "fp64")),
    "sm_90-dq-D128-bf16-dropout-large",
    "sm_90-fwd-D64-bf16-dropout-mask-full-mask=float32",
    "sm_120-fwd-D64-bf16-mask-full-mask=float32",
    "sm_100-fwd-D128-bf16-window-packed",
    *(f"sm_90-delta-D256-{dtype}-packed" for dtype in TYPES.values()),
}


def runs(kernels: Iterable[Kernel]) -> list[Any]:
    """The runs in ALWAYS, and the others where every entry of the tables is asked for."""
    return [pytest.param(k, id=k.id, marks=() if k.id in ALWAYS else pytest.mark.extended) for k in kernels]


def test_another_layout_is_noticed() -> None:
    """A parameter left out, one more, or a number of another width."""
    r = compile_kernel(Kernel("sm_80", "delta", 16))
    there, signature = parameters(r.cubin), r.signature
    assert records.layout(signature) == there
    passed = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    for name, kind in passed.items():
        others = [{n: k for n, k in signature.items() if n != name}]
        others += [signature | {name: "i64"}] * (kind == "i32")
        others += [signature | {name: "i32"}] * (kind != "i32")
        assert all(records.layout(other) != there for other in others), name
    assert records.layout(signature | {"more": "i32"}) != there


DEVICES = tuple(CAPABILITIES)
CLASSES = tuple(device for device in DEVICES if device != "generic")
TABLE = [
    Kernel(device, stage, d, dropout=dropout, causal=causal)
    for device in CAPABILITIES
    for stage in configs.STAGES
    for d in configs.BLOCK_D
    for dropout in (False, True)
    for causal in (True, False)[: 1 if device == "generic" else 2]
]
LARGE = [
    Kernel(device, stage, d, dropout=True, large=True)
    for device, stage, d in product(DEVICES, configs.STAGES, (128, 256))
]


@pytest.mark.parametrize("kernel", runs([*TABLE, *LARGE]))
def test_half_precision(kernel: Kernel) -> None:
    check(kernel)


@pytest.mark.parametrize("kernel", runs(delta_kernels()))
def test_shift_and_delta(kernel: Kernel) -> None:
    check(kernel)


@pytest.mark.parametrize("stage", configs.STAGES)
@pytest.mark.parametrize("device", CLASSES)
def test_matrix_instructions(device: str, stage: str) -> None:
    """Each class has its own, from the tensor memory on sm_100."""
    own = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(device, "mma.sync")
    k = Kernel(device, stage, 128, dtype=torch.float16, dropout=True, causal=False)
    check(k)
    ptx = compile_kernel(k).ptx
    assert [name for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx] == [own]


SOME = ("window", "softcap", "padding", "packed")


def options_table() -> Iterator[Kernel]:
    """Each tile of each class of device and options: by turns the sets of options, causal or not, the kinds of masks.

    The fewest options do not need the fewest registers: with all of them there are fewer copies of the loop. Every set
    for every tile: python -m tests.triton.compiling all, hours on one core.
    """
    few = [*combinations(SOME, 2), *combinations(SOME, 1), SOME]
    masked = [("mask", *options) for options in ((), *few)]
    every = [(), *few, *masked]
    tiles = product(CLASSES, configs.STAGES, configs.BLOCK_D, (False, True))
    for i, (device, stage, d, dropout) in enumerate(tiles):
        for j, options in enumerate((few[i % len(few)], masked[i % len(masked)], every[i * 7 % len(every)])):
            causal, kind = (i // 2 + j) % 2 == 0, 1 + (i + j) % 3
            width = NARROW[d] if j == 2 else d
            options = tuple(name for name in OPTIONS if name in options)
            yield Kernel(device, stage, width, dropout=dropout, causal=causal, options=options, mask=kind, padding=kind)
    for device, stage, d, dropout in product(DEVICES, configs.STAGES, configs.BLOCK_D, (False, True)):  # autocast's
        yield Kernel(device, stage, d, dropout=dropout, causal=False, options=("mask",), wide_mask=True)
    for d, options in product(configs.BLOCK_D, (("window", "packed"), ("mask", "packed"))):  # they spill the first
        yield Kernel("sm_100", "fwd", d, options=options)
    for i, (stage, d) in enumerate(product(configs.STAGES, configs.BLOCK_D)):
        yield Kernel("generic", stage, d, dropout=i % 2 == 0, options=SOME if i % 4 < 2 else OPTIONS)


def exact_table() -> Iterator[Kernel]:
    """Dropout with nothing else and with everything; narrow rows on a device by turns, the widest also without."""
    for i, (dtype, stage, d) in enumerate(product((torch.float32, torch.float64), configs.STAGES, configs.BLOCK_D)):
        turn = i + i // len(configs.BLOCK_D)
        yield Kernel(DEVICES[turn % 5], stage, d, dtype=dtype, dropout=True)
        for device in CLASSES if d == 256 else (DEVICES[(turn + 1) % 5],):
            for dropout in (True, False) if d == 256 else (True,):
                yield Kernel(device, stage, d, dtype=dtype, dropout=dropout, options=OPTIONS)


@pytest.mark.parametrize("device", CLASSES)
def test_the_mask_alone(device: str) -> None:
    """In the tile of tests/gpu/test_masks.py."""
    numbers = {"out": "*u8", "rng_state": "*i64", "rows": "i32", "cols": "i32", "threshold": "i32"}
    constants: dict[str, Any] = {"SITE": 1, "BLOCK_M": 32, "BLOCK_N": 64, "ORDER": 0}
    signature = numbers | dict.fromkeys(constants, "constexpr")
    major, minor = CAPABILITIES[device]
    compiled = triton.compile(
        ASTSource(philox.keep_tile_kernel, signature, constants), target=GPUTarget("cuda", 10 * major + minor, 32)
    )
    assert ptxas(compiled.asm["ptx"])[1:] == (0, 0)
    assert compiled.metadata.shared <= configs.SHARED[device]


def test_every_tile_is_compiled() -> None:
    """By `make test-all`; in every run those that are named."""
    assert {k.id for k in (*TABLE, *LARGE, *delta_kernels(), *options_table(), *exact_table())} >= ALWAYS
    tiles = set(product(CLASSES, configs.STAGES, configs.BLOCK_D, (False, True)))
    for wanted, widths in ((("some", "mask"), configs.BLOCK_D), ((None,), NARROW.values())):
        seen = {
            (k.device, k.stage, configs.block_d(k.head_dim), k.dropout, k.option_class if wanted[0] else None)
            for k in options_table()
            if k.head_dim in widths
        }
        assert {(*tile, one) for tile in tiles for one in wanted} <= seen


@pytest.mark.parametrize("kernel", runs([*options_table(), *exact_table()]))
def test_options_and_exact_types(kernel: Kernel) -> None:
    check(kernel)


def test_a_mask_wider_than_the_products_has_a_tile_of_its_own() -> None:
    """Autocast's is in float32: in flight it takes twice the memory. One in float64 is added as float32."""
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    found: dict[torch.dtype, Any] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        mask = torch.zeros(8, 8, dtype=dtype)
        a = make_problem("op", q, q, q, mask, None, None, None, "add", "none", 1.0, False, 0, 0.0, 0.0)
        assert a.mask is not None
        found[dtype] = launch._tile("fwd", replace(a, threshold=1), (9, 0)), a.mask.dtype
    half = configs.attention_config("fwd", torch.bfloat16, 64, True, (9, 0), "mask")
    wide = configs.attention_config("fwd", torch.bfloat16, 64, True, (9, 0), "wide mask")
    assert wide.stages < half.stages
    assert found[torch.bfloat16] == (half, torch.bfloat16)
    assert found[torch.float32] == found[torch.float64] == (wide, torch.float32)


def test_a_tile_too_large_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test."""
    monkeypatch.setattr(configs, "attention_config", lambda *_: configs.Config(64, 128, 8, 2))
    with pytest.raises(AssertionError, match="bytes spilled"):
        check(Kernel("sm_90", "dkdv", 128, dropout=True))


def test_hoppers_tiles_do_not_serve_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the ptxas of one compile for the other."""
    k = Kernel("sm_100", "dkdv", 128, dropout=True)
    config = replace(k, device="sm_90").config
    monkeypatch.setattr(configs, "attention_config", lambda *_: config)
    with pytest.raises(AssertionError, match="[1-9][0-9]* bytes spilled"):
        check(k)


def test_wide_rows_need_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does this one: what the pieces are for."""
    monkeypatch.setattr(configs, "attention_config", lambda *_: configs.Config(16, 16, 8, 1))
    with pytest.raises(AssertionError, match="bytes spilled"):
        check(Kernel("sm_90", "fwd", 256, dtype=torch.float32, dropout=True))
