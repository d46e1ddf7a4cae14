"""Outputs and every gradient of the fused block against the plain-PyTorch oracle.

The truth is the oracle in float64 on the same rounded inputs; how far a run may be from it is measured with eager
PyTorch in the same type (see ``tests.oracle.Expected``). With dropout all use the same masks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptfused import rng
from ckptfused.reference import dropout_masks
from tests.cases import TILED, Case, all_pairs
from tests.oracle import Inputs, expect, fused, make_inputs, rng_state, run

CASES = all_pairs()


def check(case: Case, inputs: Inputs, autocast: torch.dtype | None = None) -> None:
    spec, state = case.spec(), rng_state(inputs.x)
    expect(spec, inputs, state, autocast=autocast).check(run(fused(spec), inputs, autocast))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_all_pairs(case: Case, dtype: torch.dtype) -> None:
    check(case, make_inputs(case, dtype))


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.id)
def test_float16(case: Case) -> None:
    check(case, make_inputs(case, torch.float16))


@pytest.mark.parametrize("case", CASES[2::6], ids=lambda case: case.id)
def test_autocast(case: Case) -> None:
    """float32 input and weights, bfloat16 products; the residual stream and the gradients stay float32."""
    check(case, make_inputs(case, torch.float32), torch.bfloat16)


@pytest.mark.parametrize("case", CASES[3::12], ids=lambda case: case.id)
def test_float32_norm_weights_with_bfloat16(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    kinds = (".pre_", ".post_", ".out_", "_norm_")
    params = {n: t.float() if any(kind in n for kind in kinds) else t for n, t in inputs.params.items()}
    check(case, replace(inputs, params=params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("drop", ["0", "all"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads(head_dim: int, drop: str, dtype: torch.dtype) -> None:
    case = Case(head_dim=head_dim, drop=drop, mask="causal", rope="half", norm="rmsnorm", tokens=130)
    check(case, make_inputs(case, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), TILED, ids=lambda v: v.id if isinstance(v, Case) else str(v)[6:])
def test_ffn_tiles(case: Case, dtype: torch.dtype) -> None:
    """Sizes on both sides of the FFN's tile thresholds; for speed the mask comes from the op, which test_rng checks."""
    inputs, spec = make_inputs(case, dtype), case.spec()
    shape = (case.batch, case.tokens, case.hidden)
    masks = {2: rng.dropout_mask(shape, case.p("hidden"), rng_state(inputs.x), 2)}
    expect(spec, inputs, masks=masks).check(run(fused(spec), inputs))


@pytest.mark.parametrize("site", [0, 1, 2, 3])
def test_one_flipped_mask_bit_is_noticed(site: int) -> None:
    """A test of the tests: the comparison fails when one dropout decision of any site differs."""
    case = Case(drop="all", mask="causal", tokens=67, batch=2)
    inputs, spec = make_inputs(case, torch.float32), case.spec()
    masks = dropout_masks(spec, case.batch, case.tokens, case.width, rng_state(inputs.x))
    got = run(fused(spec), inputs)
    expect(spec, inputs, masks=masks).check(got)
    masks[site][-1, ..., -1, 3] ^= True
    assert any(failure.startswith("y:") for failure in expect(spec, inputs, masks=masks).failures(got))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tile", ["d attn.q_w", "d attn.o_w", "d ffn.gate_w", "d ffn.down_w"])
def test_one_dropped_weight_gradient_tile_is_noticed(tile: str, dtype: torch.dtype) -> None:
    """A test of the tests: the comparison fails when four rows of a weight gradient are missing."""
    case = Case(batch=2)
    inputs, spec = make_inputs(case, dtype), case.spec()
    expected, got = expect(spec, inputs), run(fused(spec), inputs)
    expected.check(got)
    got[tile] = got[tile].clone()
    got[tile][4:8] = 0
    assert [failure.split(":")[0] for failure in expected.failures(got)] == [tile]
