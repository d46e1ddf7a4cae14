"""Every tile of ffn_configs.py, compiled ahead of time: no spills, shared memory that fits, tensor-core products.

Each run compiles each device's first tile, on sm_90 also with everything in it; `make test-all` compiles them all.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, so not in the interpreter", allow_module_level=True)

from ckptfused.triton.configs import SHARED
from ckptfused.triton.ffn.configs import CANDIDATES
from tests.triton.compiling import TENSOR_MEMORY
from tests.triton.ffn_compiling import Kernel, compile_kernel, kernels

FIRST = [Kernel(device, stage, configs[0]) for device, configs in CANDIDATES.items() for stage in ("fwd", "bwd")]
ALWAYS = {*FIRST, *(replace(k, act="gelu", everything=True) for k in FIRST if k.device == "sm_90")}


def runs(kernels: list[Kernel]) -> list[Any]:
    return [pytest.param(k, id=k.id, marks=() if k in ALWAYS else pytest.mark.extended) for k in kernels]


def test_what_each_run_compiles() -> None:
    assert {*kernels()} >= ALWAYS and len(ALWAYS) == 2 * len(CANDIDATES) + 2


@pytest.mark.parametrize("k", runs([*kernels()]))
def test_limits(k: Kernel) -> None:
    r = compile_kernel(k)
    print(f"{k.id}: {r.registers} registers, {r.shared / 1024:.1f} KiB, {' '.join(sorted(r.products))}")
    assert (r.spilled, r.stack) == (0, 0)
    assert r.shared <= SHARED[k.device] and r.tensor_memory <= TENSOR_MEMORY
    assert "cp.async.commit_group" in r.ptx, "no software pipeline"
    kind = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(k.device, "mma")
    assert r.products and all(product.startswith(kind + ".") for product in r.products), r.products


@pytest.mark.parametrize(
    "k", runs([Kernel(d, "fwd", config) for d, configs in CANDIDATES.items() for config in configs])
)
def test_forward_and_replay_use_one_instruction(k: Kernel) -> None:
    """The same tensor-core instruction in both, or their products might round differently."""
    products = compile_kernel(k).products
    assert len(products) == 1
    assert compile_kernel(replace(k, stage="bwd")).products == products
