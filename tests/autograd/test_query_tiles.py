"""Blocks by tiles of queries: the values and masks of the same block in one piece, in other memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ckptfused
from ckptfused import cost
from ckptfused.cost.products import AttentionWork
from ckptfused.spec import KEEP_PRESETS, BlockSpec
from tests.autograd.test_block_oracle import _id, all_pairs_runs, check
from tests.cases import Case, all_pairs
from tests.cost.test_cost import Ops
from tests.oracle import fused, make_inputs, run

LIMIT = 1 << 14
"""Bytes: four or more tiles of 64 tokens in each case below."""
CASES = [replace(case, tokens=300, scratch=LIMIT) for case in all_pairs() if case.layout != "ffn"]


def in_one_piece(case: Case) -> BlockSpec:
    return replace(case.spec(), scratch=1 << 40)


def tiles_of(spec: BlockSpec, case: Case, dtype: torch.dtype = torch.float32) -> int:
    """Calls of attention in a forward: one a tile, of fewer queries than keys, and batch element."""
    work = cost.forward_ledger(spec, case.batch, case.tokens, case.width, dtype).work
    return sum(isinstance(item, AttentionWork) and item.keys == case.tokens for item in work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "case", "dtype"),
    [run for run in all_pairs_runs(CASES[::2], few=True) if run.values[0] == "cpu"],
    ids=_id,
)
def test_against_the_oracle(device: str, case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:  # else the sums of its weights' gradients, in float32, are more than tiles save
        case = replace(case, tokens=1800, batch=1)
    assert tiles_of(case.spec(), case, dtype) >= 4 * (1 if case.seq_first else case.batch)
    check(case, dtype, device)


@pytest.mark.parametrize(
    "case", [*CASES[::4], *(replace(c, tokens=150, batch=3) for c in CASES[1::6] if "packed" not in c.mask)], ids=_id
)
def test_values_and_masks_of_one_piece(case: Case) -> None:
    """A mask that differs in one decision differs visibly; rounding in float64 does not."""
    inputs = make_inputs(case, torch.float64)
    expected, got = run(fused(in_one_piece(case)), inputs), run(fused(case.spec()), inputs)
    assert tiles_of(in_one_piece(case), case) == 0 < tiles_of(case.spec(), case)
    for name, value in expected.items():
        zero = name == "d attn.k_norm_b"  # softmax does not see it: all rounding
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9 if zero else 1e-11, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_id)
@pytest.mark.parametrize("case", CASES[2::18], ids=_id)
def test_the_bits_do_not_depend_on_what_is_kept(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    first, *others = (run(fused(case.spec().with_keep(keep)), inputs) for keep in KEEP_PRESETS)
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("case", CASES[4::9], ids=_id)
def test_the_bits_do_not_depend_on_what_is_asked_for(case: Case) -> None:
    """Nor does a gradient that nobody asks for cost a sum."""
    ops = Ops(case, case.spec().with_keep("inputs"), make_inputs(case, torch.float32))
    kept = ops.forward()[1:]
    every = dict(zip(ops.names, ops.backward(kept, ops.names), strict=True))
    groups = [("x",), ops.names[1::2], [name for name in ops.names if ".lora" in name or name.startswith("ffn.")]]
    for names in groups:
        asked = [name for name in ops.names if name in names]
        for name, value in zip(asked, ops.backward(kept, asked), strict=True):
            assert torch.equal(value, every[name]), name


@pytest.fixture
def _threads() -> Iterator[None]:
    """Puts the number of threads back. MKL on a processor that is not Intel's rounds thin products by their number."""
    threads, (left, right), found = torch.get_num_threads(), torch.randn(2, 64, 40), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(left[:, :40] @ right[:40])
    if not all(torch.equal(found[0], other) for other in found[1:]):
        torch.set_num_threads(threads)
        pytest.skip("PyTorch's own products depend on the number of threads here")
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("case", CASES[5::18], ids=_id)
def test_the_bits_do_not_depend_on_threads(case: Case) -> None:
    found: list[dict[str, Tensor]] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(run(fused(case.spec()), make_inputs(case, torch.float32)))
    for name, value in found[0].items():
        assert all(torch.equal(other[name], value) for other in found[1:]), name


def long_block(width: int = 512, scratch: int | str | None = None) -> BlockSpec:
    block = ckptfused.FusedCheckpointBlock(width, 8, batch_first=True, norm_first=True, device="meta", scratch=scratch)
    return block.spec()


def test_peaks_are_lines_in_the_length() -> None:
    """A token more costs dx, k, v and the sums of their gradients, whatever the limit."""
    for scratch in ("64MiB", "256MiB"):
        spec = long_block(scratch=scratch)
        peaks = [cost.backward_scratch(spec, 1, length, 512, torch.bfloat16) for length in (1 << 17, 1 << 18, 1 << 19)]
        slopes = [(b - a) / (1 << n) for n, (a, b) in zip((17, 18), zip(peaks, peaks[1:], strict=False), strict=True)]
        token = 512 * 2 * (2 + 1 + 2 * 2)  # k and v; dx; dk and dv in float32
        assert slopes == pytest.approx([token, token], rel=0.01)


def test_a_short_sequence_is_one_piece() -> None:
    spec = long_block()
    case = Case(tokens=4096, width=512)
    assert tiles_of(spec, case) == 0 < tiles_of(long_block(scratch="16MiB"), case)
