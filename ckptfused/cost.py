"""What a block costs: bytes saved for backward, matrix products made and replayed, FLOPs.

The derivation of these numbers is in COST of the design notes; this module is their code, and tests hold the
extension to it exactly. Notation: B batch, T length, N = B·T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ckptfused.spec import BlockSpec, param_names

__all__ = [
    "Attention",
    "Product",
    "accumulation_type",
    "backward_flops",
    "compute_type",
    "forward_flops",
    "forward_products",
    "kept_bytes",
    "kept_values",
    "replayed",
    "saved_bytes",
]

RNG_STATE_BYTES = 16


def compute_type(spec: BlockSpec, dtype: torch.dtype) -> torch.dtype:
    """The type of the matrix products of a block whose x has this dtype."""
    return dtype if spec.compute is None else getattr(torch, spec.compute)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """The type that norms, softmax and reductions accumulate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Product:
    """One matrix product [n, c] x [c, k]."""

    name: str
    n: int
    k: int
    c: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.n * self.k * self.c


@dataclass(frozen=True)
class Attention:
    """Attention over [B, H, T, D], counted whole as `torch.utils.flop_counter` counts it, causal or not."""

    batch: int
    heads: int
    length: int
    head_dim: int
    name: str = "attention"

    @property
    def flops(self) -> int:
        """Of a forward: two products of T x T x D a head."""
        return 2 * self._product

    @property
    def backward_flops(self) -> int:
        """Five products: the scores again, and the gradients of v, of the probabilities, of q and of k."""
        return 5 * self._product

    @property
    def _product(self) -> int:
        return 2 * self.batch * self.heads * self.length * self.length * self.head_dim


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


def forward_products(spec: BlockSpec, batch: int, length: int, width: int) -> dict[str, Product | Attention]:
    """The work of a forward in its order: qkv, attention, proj, gu, down (those that the spec has).

    Products of separate weights count as one: their widths add up.
    """
    n = batch * length
    work: dict[str, Product | Attention] = {}
    if spec.attn is not None:
        a = spec.attn
        work["qkv"] = Product("qkv", n, a.qkv_width, width)
        work["attention"] = Attention(batch, a.heads, length, a.head_dim)
        work["proj"] = Product("proj", n, width, a.q_width)
    if spec.ffn is not None:
        work["gu"] = Product("gu", n, spec.ffn.gu_width, width)
        work["down"] = Product("down", n, width, spec.ffn.hidden)
    return work


def replayed(spec: BlockSpec) -> tuple[str, ...]:
    """Names of the forward's work that backward makes again when every gradient is asked for.

    Never the last product of a pre-norm block: its result is not needed. Where a closing or post norm reads a
    product's result, that product is made again unless it was kept.
    """
    attn, ffn, keep = spec.attn, spec.ffn, spec.keep
    names = []
    if attn is not None:
        mid_needed = not spec.parallel and (ffn is not None or attn.out != "none") and "mid" not in keep
        proj_needed = (mid_needed or attn.post != "none") and "proj" not in keep
        names += ["qkv"] if "qkv" not in keep else []
        names += ["attention"] if "attn" not in keep else []
        names += ["proj"] if proj_needed else []
    if ffn is not None:
        both = ffn.out != "none" and ffn.post != "none"  # what is kept then is the sum alone
        down_needed = ffn.out != "none" or ffn.post != "none"
        names += ["gu"] if "gu" not in keep else []
        names += ["down"] if down_needed and ("out" not in keep or both) else []
    return tuple(names)


def forward_flops(spec: BlockSpec, batch: int, length: int, width: int) -> int:
    """FLOPs of the matrix products and the attention of one forward."""
    return sum(work.flops for work in forward_products(spec, batch, length, width).values())


# Which gradients each piece of work takes part in: the slots of its weights, in the order of the data flow.
_WEIGHTS = {
    "down": ("ffn.down_w",),
    "gu": ("ffn.gate_w", "ffn.up_w"),
    "proj": ("attn.o_w",),
    "qkv": ("attn.q_w", "attn.k_w", "attn.v_w"),
}


def backward_flops(
    spec: BlockSpec, batch: int, length: int, width: int, needs: Collection[str] | None = None
) -> int:
    """FLOPs of one backward, replays included.

    `needs`: names of those of `x` and the parameter slots whose gradients are asked for; None: all of them. A
    frozen weight costs no product of its own; a product's input gradient is made where anything below asks.
    Replays are counted as for all gradients, less what no asked gradient needs.
    """
    work = forward_products(spec, batch, length, width)
    wanted = set(needs) if needs is not None else {"x", *param_names(spec)}
    total = sum(work[name].flops for name in replayed(spec))
    for name, item in work.items():
        if isinstance(item, Attention):
            total += item.backward_flops
            continue
        weights = _WEIGHTS[name]
        trained = any(w in wanted for w in weights)
        total += item.flops * (int(trained) + int(_flows_below(spec, name, wanted)))
    return total


def _flows_below(spec: BlockSpec, name: str, wanted: set[str]) -> bool:
    """Whether something upstream of this product's input asks for a gradient."""
    below = {
        "qkv": ("x", "attn.pre_"),
        "proj": ("x", "attn.pre_", "attn.q_", "attn.k_", "attn.v_"),
        "gu": ("x", "ffn.pre_", *(("attn.",) if not spec.parallel else ("attn.pre_",))),
        "down": ("x", "ffn.pre_", "ffn.gate_", "ffn.up_", *(("attn.",) if not spec.parallel else ("attn.pre_",))),
    }[name]
    return any(slot.startswith(prefix) for slot in wanted for prefix in below)
