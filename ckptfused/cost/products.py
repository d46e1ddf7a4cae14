"""The products of a block call, of which the counts of `ckptfused.cost` are made."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfused.spec import BlockSpec, adapter_input, adapter_output


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
