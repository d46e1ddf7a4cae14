"""Triton's kernels launched from C++: the bits that Triton's own launches give, in graphs and on other streams too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ckptfused._extension import _C
from ckptfused.triton.backend import AttentionShape, attention_backend, capability_at_hand
from tests.devices import repeatable
from tests.ops.attention_calls import Case, make_call
from tests.triton.kernel_calls import DTYPE_CASES, MASK_CASES, PACKED_CASES, PADDING_CASES

pytestmark = pytest.mark.gpu

CASES = [*MASK_CASES, *PADDING_CASES, *PACKED_CASES, *DTYPE_CASES]


@pytest.fixture(autouse=True)
def used() -> Iterator[None]:
    """Records are made and used: only where they are asked for."""
    _C.testing.use_launch_records(True)
    yield
    _C.testing.use_launch_records(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bits(case: Case) -> None:
    call = make_call(case, "cuda")
    _C.testing.use_launch_records(False)
    by_triton = call.run()
    _C.testing.use_launch_records(True)
    call.run()
    hits = _C.testing.launch_record_hits()
    assert all(map(torch.equal, call.run(), by_triton))
    copied = case.dtype == torch.float64 and (case.mask != "none" or case.padding != "none")
    assert _C.testing.launch_record_hits() - hits == (2 if ours(case) else 0) or copied


def ours(case: Case) -> bool:
    """Whether the call is Triton's: what is plain PyTorch's kernels make."""
    special = case.mask != "none" or case.padding != "none" or case.packed or case.window or case.softcap or case.p
    shape = AttentionShape((), case.dtype, case.batch, case.heads, case.tokens, case.head_dim)
    return bool(special) or attention_backend(shape, capability_at_hand())[0] == "triton"


def test_a_stream_of_its_own_and_a_graph() -> None:
    repeatable("cuda")
    call = make_call(Case(tokens=130, head_dim=64, dtype=torch.bfloat16, p=0.2, causal=True), "cuda")
    expected = call.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = call.run()
    stream.synchronize()
    assert all(map(torch.equal, beside, expected))
    graph = torch.cuda.CUDAGraph()
    hits = _C.testing.launch_record_hits()
    captured: tuple[Tensor, ...]
    with torch.cuda.graph(graph):
        captured = call.run()
    assert _C.testing.launch_record_hits() - hits == 2
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
    call.q.mul_(2.0)
    graph.replay()
    assert all(map(torch.equal, captured, call.run()))
