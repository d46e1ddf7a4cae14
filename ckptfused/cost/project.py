"""Projections with their adapters, forward and back: the model of csrc/autograd/params.cpp and adapters.cpp."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ckptfused.cost.frame import Frame
from ckptfused.cost.work import LowRank, low_rank_gradients

_ATEN_ROWS = 4096  # csrc/autograd/adapters_aten.cpp


class Projections(Frame):
    """Products of parts of weights, in a call's order."""

    def project(self, name: str, n: int, into: int, parts: Collection[tuple[str, int]]) -> None:
        """Products with parts (slot, width) of weights, and their biases."""
        for slot, width in parts:
            self.weight(f"{slot}_w")
            self.weight(f"{slot}_b")
            self.product(name, n, width, into, bias=f"{slot}_b" in self.params)
            self.add_adapters(slot, n, into, width)

    def project_backward(
        self, n: int, into: int, parts: Collection[tuple[str, int]], din: torch.dtype | None, add: bool
    ) -> None:
        for slot, width in parts:
            if din is not None:
                self.weight(f"{slot}_w")
                self.product(f"d in of {slot}", n, into, width, wide=din != self.P)
            self.weight_grad(f"{slot}_w", n, width, into)
            self.bias_grad(f"{slot}_b", width, add)
            self.adapters_backward(slot, n, into, width, True, din is not None)

    # Adapters: csrc/autograd/adapters.cpp and csrc/ops/adapters_cpu.cpp.

    def _adapter_param(self, name: str) -> torch.dtype | None:
        """The type in which an operand goes to the products; None: it is not there."""
        if self.spec.compute is not None:
            self.weight(name)
        return self.params.get(name) if self.spec.compute is None else self.P if name in self.params else None

    def _copies(self, prefixes: Collection[str], into: int, out: int, bias: bool) -> int:
        """Bytes of operands in the accumulation type, where they have another."""
        total = 0
        for prefix in prefixes:
            rank = self.spec.adapters[prefix].rank
            for slot, size in (("a", rank * into), ("b", out * rank), *((("bias", out),) if bias else ())):
                total += size * self.A.itemsize if self._adapter_param(f"{prefix}.{slot}") not in (None, self.A) else 0
        return total

    def _scratch(
        self, n: int, into: int, out: int, ranks: int, din: bool | None = None, sums: tuple[int, int, int] = (0, 0, 0)
    ) -> int:
        """din: whether a backward makes it; None: a forward. sums: ranks of d a, of d b, number of d bias."""
        from ckptfused import _C

        if self.call.device != "cpu":  # csrc/autograd/adapters_aten.cpp
            return min(n, _ATEN_ROWS) * (into + out + ranks) * self.A.itemsize
        acc, backward = str(self.A).removeprefix("torch."), din is not None
        return _C.adapter_scratch_bytes(n, into, out, ranks, backward, bool(din), *sums, acc, self.call.threads)

    def add_adapters(self, part: str, n: int, into: int, out: int) -> None:
        """Those beside a part [out, into] of a projection of n rows."""
        prefixes = self.adapters(part)
        copies = self._copies(prefixes, into, out, True)
        ranks = [self.spec.adapters[prefix].rank for prefix in prefixes]
        self.work += [LowRank(f"adapter of {part}", n, out, into, rank) for rank in ranks]
        if not prefixes or n == 0:
            return
        with self.time.temporary(copies + self._scratch(n, into, out, sum(ranks))):
            pass

    def adapters_backward(
        self, part: str, n: int, into: int, out: int, given: bool, din: bool, first: bool = True
    ) -> None:
        """given: the input is there, so that a, b and (first tile alone) the bias get their gradients."""
        ranks, wanted = {}, {}
        for prefix in self.adapters(part):
            slots = ("a", "b", *(("bias",) if first else ())) if given else ()
            asked = {slot for slot in slots if f"{prefix}.{slot}" in self.needs}
            for slot in ("a", "b"):
                self._adapter_param(f"{prefix}.{slot}")
            for slot in asked:
                self._grad(f"{prefix}.{slot}", self.A)
            if asked or din:
                ranks[prefix], wanted[prefix] = self.spec.adapters[prefix].rank, asked
        if not ranks or n == 0:
            return
        self.work += [
            work
            for prefix, rank in ranks.items()
            for work in low_rank_gradients(part, n, out, into, rank, wanted[prefix], din)
        ]
        da, db = (sum(rank for p, rank in ranks.items() if slot in wanted[p]) for slot in ("a", "b"))
        biases = sum("bias" in asked for asked in wanted.values())
        scratch = self._scratch(n, into, out, sum(ranks.values()), din, (da, db, biases))
        with self.time.temporary(self._copies(ranks, into, out, False) + scratch):
            pass
