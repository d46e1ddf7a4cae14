"""Budgets of the attention kernels' main loops: what a GPU executes an element of the tile, counted without one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and does not compile", allow_module_level=True)

from ckptfused.triton import configs
from tests.triton.compiling import KERNELS, OPTIONS, Kernel, compile_kernel
from tests.triton.sass import loops, main_loop
from tests.triton.test_compile import THIS_TRITON

pytestmark = pytest.mark.skipif(not THIS_TRITON, reason="the budgets are those of Triton 3.6's compiler")

# Instructions of a thread's loop for each element of the tile that it holds, rounded up, barriers, and stores to shared
# memory. A loop has the two barriers of its pipeline, and no more unless warps exchange probabilities, as where several
# of them share 32 keys, or a mask is read, or sm_100's tensor memory is waited for. benchmarks/NOTES.md has the counts
# and the floor.
BUDGETS = {
    "sm_90-fwd-D64-bf16": (7.5, 2, 0),
    "sm_90-fwd-D64-bf16-dropout": (13.5, 2, 0),
    "sm_90-fwd-D64-bf16-dropout-window": (26.8, 2, 0),
    "sm_90-fwd-D128-bf16": (11.4, 2, 0),
    "sm_90-fwd-D128-bf16-dropout": (17.2, 2, 0),
    "sm_90-fwd-D128-bf16-mask": (41.2, 9, 7),
    "sm_90-fwd-D256-bf16": (14.8, 2, 0),
    "sm_90-dq-D64-bf16-dropout": (13.7, 2, 0),
    "sm_90-dq-D128-bf16": (9.0, 2, 0),
    "sm_90-dq-D128-bf16-dropout": (15.0, 2, 0),
    "sm_90-dq-D128-bf16-dropout-window": (29.2, 2, 0),
    "sm_90-dkdv-D64-bf16-dropout": (36.2, 2, 0),
    "sm_90-dkdv-D128-bf16": (18.2, 2, 0),
    "sm_90-dkdv-D64-bf16-dropout-mask": (73.0, 15, 7),
    "sm_90-dkdv-D128-bf16-dropout": (39.1, 2, 0),
    "sm_90-dkdv-D128-bf16-window": (24.9, 2, 0),
    "sm_90-dkdv-D128-bf16-mask": (49.5, 9, 18),
    "sm_90-dkdv-D128-bf16-dropout-mask": (86.0, 9, 7),
    "sm_80-fwd-D64-bf16-dropout": (17.7, 2, 0),
    "sm_80-fwd-D128-bf16-dropout": (27.4, 2, 0),
    "sm_80-dq-D64-bf16-dropout": (16.6, 2, 0),
    "sm_80-dkdv-D64-bf16-dropout": (46.2, 5, 8),
    "sm_80-dkdv-D128-bf16-dropout": (57.2, 5, 8),
    "sm_100-fwd-D64-bf16-dropout": (16.3, 5, 1),
    "sm_100-fwd-D128-bf16": (8.9, 5, 1),
    "sm_100-fwd-D128-bf16-dropout": (18.3, 5, 1),
    "sm_100-dq-D64-bf16-dropout": (16.6, 4, 0),
    "sm_100-dq-D128-bf16-dropout": (17.9, 4, 0),
    "sm_100-dkdv-D64-bf16-dropout": (72.0, 6, 0),
    "sm_100-dkdv-D128-bf16-dropout": (64.8, 13, 8),
    "sm_120-fwd-D64-bf16-dropout": (17.1, 2, 0),
    "sm_120-fwd-D128-bf16": (17.3, 2, 0),
    "sm_120-fwd-D128-bf16-dropout": (27.7, 2, 0),
    "sm_120-dq-D64-bf16-dropout": (17.0, 2, 0),
    "sm_120-dq-D128-bf16-dropout": (25.0, 2, 0),
    "sm_120-dkdv-D64-bf16-dropout": (43.4, 5, 2),
    "sm_120-dkdv-D128-bf16-dropout": (54.4, 5, 2),
}
ALWAYS = {f"sm_90-{stage}-D128-bf16-dropout" for stage in configs.STAGES} | {"sm_80-fwd-D128-bf16-dropout"}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def kernel(name: str) -> Kernel:
    device, stage, d, *rest = name.split("-")
    options = tuple(name for name in OPTIONS if name in rest)
    return Kernel(device, stage, int(d[1:]), dropout="dropout" in rest, options=options)


def check(name: str) -> None:
    k = kernel(name)
    assert k.id == name
    loop = main_loop(compile_kernel(k).cubin)
    each = loop.count() * 32 * k.config.warps / (k.config.block_m * k.config.block_n)
    budget, barriers, stores = BUDGETS[name]
    assert each <= budget, f"{each:.1f} instructions an element, budget {budget}: {loop.opcodes.most_common()}"
    assert loop.count("BAR") <= barriers and loop.count("STS", "STSM") <= stores, loop.opcodes.most_common()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.extended) for n in BUDGETS])
def test_instructions_of_the_main_loop(name: str) -> None:
    check(name)


def test_a_tile_that_draws_too_often_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: with 16 keys a tile no thread holds all that a Philox call decides."""
    monkeypatch.setattr(configs, "attention_config", lambda *_: configs.Config(128, 16, 8, 3))
    with pytest.raises(AssertionError, match="instructions an element"):
        check("sm_90-fwd-D128-bf16-dropout")


def test_loops_of_a_listing() -> None:
    lines = ("MOV R1, c[0x0]", ".L_1:", "FADD R0, R0, R0", ".L_2:", "@P0 HMMA.16816.F32 R0, R1, R2", "BAR.SYNC 0x0")
    lines += ("@!P1 BRA `(.L_2)", "STS [R0], R1", "@P0 BRA P2, `(.L_1)", "@P0 BRA `(.L_3)", ".L_3:", "EXIT")
    text = "\n".join(line if line[0] == "." else f"        /*{i:04x}*/   {line} ;" for i, line in enumerate(lines))
    (inner,) = loops(text)
    assert inner.count() == 3 and inner.matrix == 1 and inner.count("BAR") == 1 and not inner.count("STS")


def test_sizes_are_not_specialised() -> None:
    """What is compiled ahead of time is what runs, whatever the number of tokens: every number of an attention kernel
    but strides and factors."""
    known = re.compile(
        r"(.*_[bhtmn]|scale|softcap|do|q|k|v|o|lse|shift|delta|dq|dk|dv|mask|padding|cu_seqlens|rng_state)"
    )
    for kernel in KERNELS.values():
        numbers = [p for p in kernel.params if not p.is_constexpr and not known.fullmatch(p.name)]
        assert {"tiles", "queries", "sequences"} <= {p.name for p in numbers}
        assert all(p.do_not_specialize for p in numbers), [p.name for p in numbers]
