"""What a block costs: bytes saved for backward, matrix products made and replayed, FLOPs, peak scratch, launches.

Two accounts, and tests hold each to the other and to PyTorch's own: closed forms of what is saved, made and replayed
(`saved_tensors`, `products`, and `replayed` here), and the ledger of a block that runs on meta tensors (`ledger`), of
which `seconds` makes times. Notation: B batch, T length, N = B·T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch

from ckptfused.cost.ledger import Ledger, count
from ckptfused.cost.loss import loss_flops, loss_ledgers, loss_saved_bytes
from ckptfused.cost.open_ledger import OpenLedger
from ckptfused.cost.products import AttentionWork, LowRank, Product, forward_adapters, forward_products
from ckptfused.cost.saved_tensors import compute_type, kept_bytes, kept_values, saved_bytes
from ckptfused.cost.seconds import Rates, Seconds, block_seconds, ledger_seconds
from ckptfused.ffn_tiles import ffn_tiles
from ckptfused.spec import BlockSpec, param_names
from ckptfused.triton.problem import accumulation_type

__all__ = [
    "AttentionWork",
    "Ledger",
    "LowRank",
    "OpenLedger",
    "Product",
    "Rates",
    "Seconds",
    "accumulation_type",
    "backward_flops",
    "backward_ledger",
    "backward_scratch",
    "backward_work",
    "block_seconds",
    "compute_type",
    "ffn_tiles",
    "forward_adapters",
    "forward_flops",
    "forward_ledger",
    "forward_products",
    "forward_scratch",
    "kept_bytes",
    "kept_values",
    "launches",
    "ledger_seconds",
    "loss_flops",
    "loss_ledgers",
    "loss_saved_bytes",
    "replayed",
    "saved_bytes",
]


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
    """FLOPs of the matrix products, the attention and the adapters of one forward."""
    dims = (batch, length, width)
    return sum(w.flops for w in (*forward_products(spec, *dims).values(), *forward_adapters(spec, *dims).values()))


def _wanted(spec: BlockSpec, needs: Collection[str] | None) -> Collection[str]:
    return ("x", *param_names(spec)) if needs is None else needs


def forward_ledger(
    spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype, *, save: bool = True, **options: Any
) -> Ledger:
    """Every allocation, product and launch of one block_fwd, its results (y and the kept values) included.

    On the CPU exact, with the scratch of PyTorch's flash attention, but for what else one PyTorch op allocates and
    frees within itself (`sum`; oneDNN's products), and a few rows a thread in the row kernels.

    `save`: whether kept values are returned. `options`: those of `ledger.count`.
    """
    return count(spec, batch, length, width, dtype, save=save, **options)


def backward_ledger(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    needs: Collection[str] | None = None,
    **options: Any,
) -> Ledger:
    """The same of one block_bwd, the gradients that it returns included; what was saved was there before.

    `needs`: names of those of `x` and the parameter slots whose gradients are asked for; None: all of them. What only
    other gradients would need is not made.
    """
    return count(spec, batch, length, width, dtype, needs=_wanted(spec, needs), **options)


def forward_scratch(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype, **options: Any) -> int:
    """The most bytes that one block_fwd holds at a time, its results included; the options of `forward_ledger`."""
    return forward_ledger(spec, batch, length, width, dtype, **options).peak


def backward_scratch(spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype, **options: Any) -> int:
    """The most bytes that one block_bwd holds at a time, its results included; the options of `backward_ledger`."""
    return backward_ledger(spec, batch, length, width, dtype, **options).peak


def launches(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    save: bool = True,
    needs: Collection[str] | None = None,
    **options: Any,
) -> tuple[int, int]:
    """How many kernels one forward and one backward launch; the options of `forward_ledger` and `backward_ledger`.

    On a GPU a product and a kernel of PyTorch's attention count once for each that its source launches at usual sizes.
    On the CPU a launch is a call: of a small op, a product, or a PyTorch operator that copies, fills or adds.
    """
    forward = forward_ledger(spec, batch, length, width, dtype, save=save, **options)
    backward = backward_ledger(spec, batch, length, width, dtype, needs=needs, **options)
    return forward.launches.total(), backward.launches.total()


def backward_work(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    needs: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Product | AttentionWork | LowRank]:
    """The products, attention calls and adapters of one backward in their order, replays included.

    A replay has the name that `forward_products` gives it. `needs`: as in `backward_ledger`.
    `dtype`: the FFN is cut as for an x of it; None: in one piece. A cut FFN with a post or closing norm makes gu twice.
    """
    call = (spec, batch, length, width, dtype or torch.float32)
    return count(*call, needs=_wanted(spec, needs), cut_ffn=dtype is not None).work


def backward_flops(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    needs: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """FLOPs of one backward, replays included; `needs` and `dtype` as in `backward_work`.

    Batch and length may be symbols where no dtype is given.
    """
    if dtype is not None:
        return sum(work.flops for work in backward_work(spec, batch, length, width, needs, dtype))
    products, attention = _backward_flops_of_a_token(spec, width, tuple(_wanted(spec, needs)))
    return batch * length * (products + length * attention)


@lru_cache(maxsize=512)
def _backward_flops_of_a_token(spec: BlockSpec, width: int, needs: tuple[str, ...]) -> tuple[int, int]:
    """FLOPs of the products and of attention, in one piece: the former grow with B·T, the latter with B·T²."""
    work = backward_work(spec, 1, 1, width, needs)
    attention = sum(item.flops for item in work if isinstance(item, AttentionWork))
    return sum(item.flops for item in work) - attention, attention
