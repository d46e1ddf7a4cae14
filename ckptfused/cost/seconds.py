"""How long a block takes on a device whose rates are known: its ledger's products by waves, attention, and bytes.

Each kernel after the other. A product takes its waves, and the bytes of a sum that it adds to beside; attention its
FLOPs; every other kernel the bytes of the tensors that it reads and writes; each kernel a launch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import torch

from ckptfused.cost.ledger import Ledger, count
from ckptfused.cost.products import AttentionWork, LowRank
from ckptfused.cost.saved_tensors import compute_type
from ckptfused.spec import BlockSpec, param_names

LEDGER_TYPES = {"Float": torch.float32, "Double": torch.float64, "BFloat16": torch.bfloat16, "Half": torch.float16}


class Rates(Protocol):
    """What is known of a device: `ckptfused.simulate.devices.Device` is one. Rates are of a second."""

    @property
    def kind(self) -> str: ...
    @property
    def copy(self) -> float:
        """Bytes read and written."""

    @property
    def launch(self) -> float:
        """Seconds."""

    def product_rate(self, dtype: torch.dtype) -> float:
        """FLOPs."""

    def attention_rate(self, dtype: torch.dtype, tiled: bool = False) -> float:
        """FLOPs. tiled: by tiles of queries."""

    def product_seconds(self, rows: int, columns: int, depth: int, dtype: torch.dtype, batch: int = 1) -> float:
        """Seconds of one matrix product, its launch included."""


class Seconds(NamedTuple):
    """Seconds of a call, by what they are spent on."""

    products: float
    sums: float
    """Reading sums that products add to, and writing those wider than their operands."""
    attention: float
    memory: float
    """Kernels that only move memory: norms, activations, rotations, copies."""
    launches: float
    """Launches of all kernels but products, whose own are counted with them."""

    @property
    def total(self) -> float:
        return sum(self)


def ledger_seconds(ledger: Ledger, device: Rates, dtype: torch.dtype, causal: bool) -> Seconds:
    """Seconds of all events in a ledger. dtype: of attention and of adapters."""
    products = sums = attention = memory = launches = 0.0
    for event in ledger.events:
        kind, name, _, sizes, operands = event
        if kind == "product":
            rows, columns, depth, summed = sizes[:4]
            products += device.product_seconds(rows, columns, depth, LEDGER_TYPES[operands])
            sums += summed / device.copy
        elif kind == "launch" and name != "product":
            launches += device.launch
            memory += 0.0 if "attention" in name or name.startswith("ffn_up") else sizes[0] / device.copy
    for work in ledger.work:
        if isinstance(work, AttentionWork):
            attention += work.flops * (0.5 if causal else 1.0) / device.attention_rate(dtype, work.keys is not None)
        elif isinstance(work, LowRank):
            moved = work.n * max(work.k, work.c) * dtype.itemsize / device.copy
            memory += max(work.flops / device.product_rate(dtype), moved)
    return Seconds(products, sums, attention, memory, launches)


def block_seconds(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    device: Rates,
    *,
    needs: Collection[str] | None = None,
    **options: Any,
) -> tuple[Seconds, Seconds]:
    """Seconds of one forward and one backward of a block that keeps what its spec says (`spec.with_keep`).

    device: `ckptfused.simulate.devices.device_named("h200")`, or any other rates. `needs`: whose gradients are asked
    for, as in `backward_ledger`; None: all. `options`: those of `ledger.count`.
    """
    call, given = (spec, batch, length, width, dtype), {"device": device.kind, **options}
    asked = ("x", *param_names(spec)) if needs is None else needs
    compute, causal = compute_type(spec, dtype), spec.attn is not None and spec.attn.causal
    forward, backward = count(*call, **given), count(*call, needs=asked, **given)
    return ledger_seconds(forward, device, compute, causal), ledger_seconds(backward, device, compute, causal)
