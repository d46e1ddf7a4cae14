"""The work and the kept values of a block call: what the counts of `ckptfused.cost` are made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ckptfused.spec import BlockSpec, adapter_input, adapter_output
from ckptfused.triton.problem import accumulation_type

RNG_STATE_BYTES = 16


def compute_type(spec: BlockSpec, dtype: torch.dtype) -> torch.dtype:
    """The type of the matrix products of a block whose x has this dtype."""
    return dtype if spec.compute is None else getattr(torch, spec.compute)


@dataclass(frozen=True)
class Product:
    """One matrix product [n, c] x [c, k]."""

    name: str
    n: int
    k: int
    c: int
    sum_bytes: int = 0
    """Read of a sum that it adds to, and written of a result that is wider than its operands."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.n * self.k * self.c


@dataclass(frozen=True)
class AttentionWork:
    """Attention over [B, H, T, D], counted whole as `torch.utils.flop_counter` counts it, causal or not."""

    batch: int
    heads: int
    length: int
    head_dim: int
    name: str = "attention"
    products: int = 2
    """Products of T x T x D a head. A backward makes five: the scores again, and the gradients of v, of the
    probabilities, of q and of k."""
    keys: int | None = None
    """Keys of a tile of `length` queries; None: as many as queries."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        keys = self.length if self.keys is None else self.keys
        return self.products * 2 * self.batch * self.heads * self.length * keys * self.head_dim


@dataclass(frozen=True)
class LowRank:
    """Products of an adapter of this rank beside one [n, c] x [c, k]."""

    name: str
    n: int
    k: int
    c: int
    rank: int
    """Rank of the adapters; k is 0 in products on the side of x alone, c in those on the side of y alone."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.n * (self.k + self.c) * self.rank


def kept_values(
    spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that block_fwd returns for backward, in its order.

    **Shapes** Batch-first for `o`, [B, T, H·D], and `lse`, [B, H, T]; the others follow the layout of x.
    """
    compute, acc = compute_type(spec, dtype), accumulation_type(dtype)
    lead = (length, batch) if spec.seq_first else (batch, length)
    values: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in spec.keep:
        if name == "attn":
            assert spec.attn is not None
            values["o"] = ((batch, length, spec.attn.q_width), compute)
            values["lse"] = ((batch, spec.attn.heads, length), acc)
        elif name == "mid":
            values["mid"] = ((*lead, width), dtype)
        elif name == "proj":
            values["proj"] = ((*lead, width), compute)
        elif name == "qkv":
            assert spec.attn is not None
            values["qkv"] = ((*lead, spec.attn.qkv_width), compute)
        elif name == "gu":
            assert spec.ffn is not None
            values["gu"] = ((*lead, spec.ffn.gu_width), compute)
        elif name == "out":
            assert spec.ffn is not None
            values["out"] = ((*lead, width), dtype if spec.ffn.out != "none" else compute)
    return values


def _bytes(shape: Collection[int], dtype: torch.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def kept_bytes(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the kept values of one call."""
    return sum(_bytes(shape, kind) for shape, kind in kept_values(spec, batch, length, width, dtype).values())


def saved_bytes(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that one call holds until backward: x, the random state where some p > 0, and the kept values.

    Parameters and tensors that the caller owns (masks, cos, sin, cu_seqlens) do not count.
    """
    rng = RNG_STATE_BYTES if spec.has_dropout else 0
    return _bytes((batch, length, width), dtype) + rng + kept_bytes(spec, batch, length, width, dtype)


def forward_products(spec: BlockSpec, batch: int, length: int, width: int) -> dict[str, Product | AttentionWork]:
    """The work of a forward in its order: qkv, attention, proj, gu, down (those that the spec has).

    Products of separate weights count as one: their widths add up. Adapters: `forward_adapters`.
    """
    n = batch * length
    work: dict[str, Product | AttentionWork] = {}
    if spec.attn is not None:
        a = spec.attn
        work["qkv"] = Product("qkv", n, a.qkv_width, width)
        work["attention"] = AttentionWork(batch, a.heads, length, a.head_dim)
        work["proj"] = Product("proj", n, width, a.q_width)
    if spec.ffn is not None:
        work["gu"] = Product("gu", n, spec.ffn.gu_width, width)
        work["down"] = Product("down", n, width, spec.ffn.hidden)
    return work


def forward_adapters(spec: BlockSpec, batch: int, length: int, width: int) -> dict[str, LowRank]:
    """The adapters' part of a forward, by the prefix of their slots."""
    n = batch * length
    return {
        prefix: LowRank(
            f"adapter of {prefix.split('.')[0]}.{adapter.target}",
            *(n, adapter_output(spec, prefix, width), adapter_input(spec, prefix, width), adapter.rank),
        )
        for prefix, adapter in spec.adapters.items()
    }
