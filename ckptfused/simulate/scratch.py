"""What ops of PyTorch's allocate and free within themselves on the CPU at hand: each runs alone, once for all of its
kind.

oneDNN reorders a convolution's operands, or lays its patches out, as shapes, types and the processor have it: 0 to 150
times the operands in random convolutions, so that no closed form and no factor bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ckptfused.compat.torch_dispatch import tensors_of
from ckptfused.compat.torch_memory import allocations
from ckptfused.simulate.alone import OpCall

LARGEST, MOST_FLOPS = 1 << 30, 1e11
"""Bytes of operands and results, and FLOPs, above which an op is not run as it is."""
aten = torch.ops.aten
_BATCHED = {aten.convolution: (0,), aten.convolution_backward: (0, 1)}
"""By where their operands with a batch are. Of too large a batch a part runs, as often as the batch has it counts."""


class Scratch:
    """Bytes by kind of op."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int | None] = {}

    def of(self, op: Any, args: Any, kwargs: Any, out: Any) -> int | None:
        """Bytes of one call beside its results; None: it cannot be run alone, or is too large. out: the results."""
        tensors = tensors_of(args, kwargs, out)
        if any(t.layout != torch.strided for t in tensors):
            return None
        sizes = sum(t.nbytes for t in tensors)
        packet = op.overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        parts, over = 1, max(sizes / LARGEST, flops / MOST_FLOPS)
        if over > 1:
            if packet not in _BATCHED:
                return None
            batch = max(1, args[0].size(0))
            each = max(1, int(batch / over))
            parts = -(-batch // each)
            places = _BATCHED[packet]
            args = [value[:each] if place in places else value for place, value in enumerate(args)]
        call = OpCall(op, args, kwargs)
        if call.kind not in self._known:
            self._known[call.kind] = scratch_of(call)
        found = self._known[call.kind]
        return found if found is None else parts * found


def scratch_of(call: OpCall) -> int | None:
    """Bytes that a call holds at most beside its results; None: it cannot be run alone."""
    found: list[int] = []

    def observed(function: Callable[[], Any]) -> None:
        _, changes = allocations(function)
        found.append(max(accumulate(changes, initial=0)) - sum(changes))

    return found[0] if call.run(observed) else None
