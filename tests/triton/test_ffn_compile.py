"""Every tile of ffn_configs.py, compiled ahead of time: no spills, shared memory that fits, tensor-core products."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, so not in the interpreter", allow_module_level=True)

from ckptfused.triton.configs import SHARED
from ckptfused.triton.ffn_configs import CANDIDATES
from tests.triton.ffn_compiling import Kernel, compile_kernel, kernels


@pytest.mark.slow
@pytest.mark.parametrize("k", list(kernels()), ids=lambda k: k.id)
def test_limits(k: Kernel) -> None:
    r = compile_kernel(k)
    print(f"{k.id}: {r.registers} registers, {r.shared / 1024:.1f} KiB, {' '.join(sorted(r.products))}")
    assert (r.spilled, r.stack) == (0, 0)
    assert r.shared <= SHARED[k.device]
    assert "cp.async.commit_group" in r.ptx, "no software pipeline"
    kind = "wgmma" if k.device == "sm_90" else "mma"
    assert r.products and all(product.startswith(kind + ".") for product in r.products), r.products


@pytest.mark.slow
@pytest.mark.parametrize("device", CANDIDATES)
def test_forward_and_replay_use_one_instruction(device: str) -> None:
    """The same tensor-core instruction in both, or their products might round differently."""
    for config in CANDIDATES[device]:
        forward = Kernel(device, "fwd", config)
        products = compile_kernel(forward).products
        assert len(products) == 1
        assert compile_kernel(replace(forward, stage="bwd")).products == products


def test_plain_kernel_of_the_first_tile() -> None:
    """What can be seen in seconds, so that it is seen every time."""
    test_limits(Kernel("sm_90", "fwd", CANDIDATES["sm_90"][0]))
