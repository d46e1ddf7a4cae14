"""What the op of experts takes within itself, counted and as it runs: random calls, whatever they compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused.cost.open_ledger import OpenLedger
from ckptfused.profiler.allocator import CPUAllocator
from tests.ops.test_experts import SPECS
from tests.quantized import WAYS, stored_stacks

FORWARD, BACKWARD = torch.ops.ckptfused.experts_fwd.default, torch.ops.ckptfused.experts_bwd.default
# In bfloat16 oneDNN's products take memory of their own, which a profile says apart.
TYPES = (torch.float32, torch.float16, torch.float64)
# Of odd rows and large blocks bitsandbytes makes numbers by PyTorch's operations on a CPU.
KERNELS = [way for way in WAYS if way.block < 2048]


def some_call(choose: random.Random) -> tuple[list[Any], list[bool]]:
    """The forward op's arguments, and which gradients are asked for."""
    spec = replace(choose.choice([*SPECS.values()]), transposed=choose.random() < 0.5)
    count, tokens = choose.choice([1, 1, 2, 5, 17]), choose.choice([1, 7, 64, 200, 333])
    width, hidden, rank = choose.choice([8, 33, 64]), choose.choice([8, 24, 50]), 4
    k, dtype = choose.randint(1, min(count, 3)), choose.choice(TYPES)
    stored = choose.choice([dtype, dtype, torch.float32])
    randn = lambda *shape: torch.randn(count, *shape, dtype=stored)  # noqa: E731
    shaped = lambda out, into: randn(into, out) if spec.transposed else randn(out, into)  # noqa: E731
    wide = hidden * (2 if spec.gated else 1)
    x = torch.randn(tokens, width, dtype=dtype)
    ids = torch.rand(tokens, count).topk(k).indices
    if choose.random() < 0.3:  # so crowded that experts' rows go in parts
        ids = (choose.randrange(count) + torch.arange(k)).remainder(count).expand(tokens, k)
    ids = ids.to(choose.choice([torch.int64, torch.uint8, torch.int16]))
    weights = torch.rand(tokens, k, dtype=choose.choice([dtype, torch.float32]))
    up_bias, down_bias = (randn(n) if choose.random() < 0.5 else None for n in (wide, width))
    pairs: list[list[Tensor | None]] = [
        [randn(rank, into), randn(out, rank)] if choose.random() < 0.3 else [None, None]
        for into, out in ((width, wide), (hidden, width))
    ]
    adapters = pairs[0] + pairs[1]
    if adapters == [None] * 4:
        adapters = []
    up, down, beside = shaped(wide, width), shaped(width, hidden), []
    if choose.random() < 0.4 and width % 2 == 0:
        spec, up, down, beside, _ = stored_stacks(spec, up, down, (choose.choice(KERNELS), choose.choice(KERNELS)))
    call = [x, ids, weights, up, up_bias, down, down_bias, adapters, beside]
    slots = [x, weights, *call[3:7], *(adapters or [None] * 4)]
    needs = [t is not None and t.is_floating_point() and choose.random() < 0.6 for t in slots]
    spec = replace(spec, up_p=choose.choice([0.0, 0.3]), down_p=choose.choice([0.0, 0.3]))
    state = torch.tensor([1, 0]) if spec.has_dropout else None
    return [*call, state, spec.to_string()], needs if any(needs) else [True, *needs[1:]]


def measured_peak(run: Callable[[], object]) -> int:
    changes = CPUAllocator().record(run).changes
    return max(accumulate(change.size for change in changes))


def counted_peak(op: Any, call: Sequence[Any]) -> int:
    def without_data(value: Any) -> Any:
        if isinstance(value, list):
            return [without_data(one) for one in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    call = without_data(list(call))
    with OpenLedger("cpu") as opened:
        op(*call)
    return opened.ledger.peak


@pytest.mark.parametrize("seed", range(64))
def test_a_call_takes_what_was_counted(seed: int) -> None:
    """To the byte where there is one expert, which has all rows; at most that, where others have them."""
    torch.manual_seed(seed)
    call, needs = some_call(random.Random(seed))
    dy = torch.randn_like(call[0])
    for op, args in ((FORWARD, call), (BACKWARD, [dy, *call, needs])):
        measured, counted = measured_peak(lambda op=op, args=args: op(*args)), counted_peak(op, args)
        assert measured <= counted
        if call[3].size(0) == 1:
            assert measured == counted
