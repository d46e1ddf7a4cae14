"""Predicted times against numbers by hand: the derivation's ideals, and bytes of small ops and of sums."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptfused import FusedCheckpointBlock, cost
from ckptfused.simulate.devices import DEVICES, Device, device_named
from ckptfused.simulate.roofline import Work
from ckptfused.spec import BlockSpec, FFNSpec, param_shapes

N, C, F = 2 * 8192, 4096, 14336
CALL = (2, 8192, C, torch.bfloat16)


def llama(keep: str = "inputs") -> tuple[BlockSpec, dict[str, Any]]:
    """A Llama-3-8B block, and its parameters."""
    size = {"dim_feedforward": F, "num_kv_heads": 8, "keep": keep}
    block = FusedCheckpointBlock.llama(C, 32, **size, device="meta", dtype=torch.bfloat16)
    spec = block.spec(torch.bfloat16)
    names = [name for name in param_shapes(spec, C) if not name.endswith("_b")]
    return spec, {"params": dict.fromkeys(names, torch.bfloat16)}


IDEALS = {"all": 36.3, "attention+mid": 42.3, "attention": 43.0, "inputs": 45.1}
"""Milliseconds on an H200, products at full rate and without launches: derived by hand, one number a preset."""


@pytest.mark.parametrize("keep", IDEALS)
def test_an_h200_takes_what_was_derived(keep: str) -> None:
    """Waves and launches are the 3 % that it may take more; nothing lets it take less."""
    spec, options = llama(keep)
    forward, backward = cost.block_seconds(spec, *CALL, DEVICES["h200"], **options)
    assert IDEALS[keep] <= 1e3 * (forward.total + backward.total) <= 1.03 * IDEALS[keep]
    assert 1e3 * forward.attention == pytest.approx(2.08, rel=0.02)
    assert forward.sums == 2 * N * C / DEVICES["h200"].copy  # the down product reads the stream that it adds to
    assert backward.sums == 0.0


def test_small_ops_move_what_they_are_given() -> None:
    """By hand, in numbers of bytes a token: a Llama forward reads and writes each tensor once."""
    spec, options = llama()
    forward = cost.forward_ledger(spec, *CALL, device="cuda", **options)
    moved: dict[str, int] = {}
    for kind, name, _, sizes, _ in forward.events:
        if kind == "launch":
            moved[name] = moved.get(name, 0) + sizes[0]
    assert moved["norm_fwd"] == 2 * (N * 2 * C + C)  # and its weight
    assert moved["residual_fwd"] == 2 * (N * 4 * C + C)  # x, proj -> mid, n2
    assert moved["activation_fwd"] == 2 * N * 3 * F
    assert moved["qk_fwd"] == 2 * N * 2 * (C + 1024) + 2 * 4 * 8192 * 64  # q and k in place; cos and sin


def test_rates_are_the_devices() -> None:
    """Twice the copy rate halves what memory takes, and nothing else."""
    spec, options = llama()
    card = DEVICES["h200"]
    slow, fast = (cost.block_seconds(spec, *CALL, d, **options) for d in (card, replace(card, copy=2 * card.copy)))
    for there, here in zip(fast, slow, strict=True):
        assert there.memory == pytest.approx(here.memory / 2)
        assert there[:1] + there[2:3] == here[:1] + here[2:3]


def test_tiles_of_queries_are_flash_attentions() -> None:
    """The same work, on Hopper at the 12.0 ms of FlashAttention-2 where cuDNN takes 7.41; on Ampere both are its."""
    spec, options = llama()
    call = (1, 1 << 17, C, torch.bfloat16)
    for card, share in (("h200", 7.41 / 12.0), ("a100", 1.0)):
        whole, tiles = (
            sum(each.attention for each in cost.block_seconds(s, *call, device_named(card), **options, needs=("x",)))
            for s in (spec, replace(spec, scratch=1 << 30))
        )
        assert whole / tiles == pytest.approx(share, rel=0.01)


def test_sums_of_tiles_are_counted() -> None:
    """Rows cut in two: each weight gradient is a float32 sum, written twice and read once."""
    hidden, width, rows = 512, 128, 8192
    spec = BlockSpec(ffn=FFNSpec("relu", hidden), scratch=2 * rows * hidden * 2 // 2)
    assert cost.ffn_tiles(rows, width, hidden, False, 2, spec.scratch, "cuda") == (rows // 2, hidden)
    params = {"ffn.up_w": torch.bfloat16, "ffn.down_w": torch.bfloat16}
    work = cost.backward_ledger(spec, 1, rows, width, torch.bfloat16, device="cuda", params=params).work
    sums = {item.name: 0 for item in work if isinstance(item, cost.Product)}
    for item in work:
        if isinstance(item, cost.Product):
            sums[item.name] += item.sum_bytes
    assert sums == {"gu": 0, "d h": 0, "d in of ffn.up": 0} | dict.fromkeys(
        ("d ffn.up_w", "d ffn.down_w"), 3 * 4 * hidden * width
    )


def test_anything_on_meta_tensors_has_a_time() -> None:
    """By hand: a product and what is added to it."""
    card: Device = DEVICES["h200"]
    with torch.device("meta"):
        a, b = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    product = card.product_seconds(4096, 4096, 4096, torch.bfloat16)
    added = 3 * 2 * 4096 * 4096 / card.copy + card.launch
    opened, spent = cost.OpenLedger(card.kind), list[float]()
    work = Work(card, opened)
    work.spend = spent.append
    with opened, work:
        a @ b + b
    assert sum(spent) == pytest.approx(product + added)


def waves_filled(product: cost.Product, multiprocessors: int = 132) -> float:
    """The share of its waves that a product fills, in tiles of 128 x 256."""
    tiles = -(-product.n // 128) * -(-product.k // 256)
    return tiles / (-(-tiles // multiprocessors) * multiprocessors)


def test_tiles_fill_their_waves() -> None:
    """A Llama-3-8B block under 256 MiB: seven tiles of 2048, each product once a tile, and what they add up."""
    spec, options = llama()
    spec = replace(spec, scratch=256 << 20)
    assert cost.ffn_tiles(N, C, F, True, 2, spec.scratch, "cuda") == (N, 2048)
    assert cost.ffn_tiles(N, C, F, True, 2, spec.scratch) == (N, 2432), "a CPU has no waves"
    forward, backward = (
        Counter((w.name, w.n, w.k, w.c) for w in count(spec, *CALL, device="cuda", **options).work if is_ffn(w))
        for count in (cost.forward_ledger, cost.backward_ledger)
    )
    assert forward == {("gu", N, 4096, C): 7, ("down", N, C, F): 1}
    assert backward == {
        ("gu", N, 4096, C): 7,
        ("d h", N, 2048, C): 7,
        ("d ffn.down_w", C, 2048, N): 7,
        ("d in of ffn.gate", N, C, 4096): 7,
        ("d ffn.gate_w", 4096, C, N): 7,
    }
    work = cost.backward_ledger(spec, *CALL, device="cuda", **options).work
    assert min(waves_filled(w) for w in work if is_ffn(w)) > 0.96
    assert sum(w.sum_bytes for w in work if is_ffn(w)) == (7 + 6) * 4 * N * C  # the first tile's share is written alone


def is_ffn(work: object) -> bool:
    names = ("gu", "down", "d h", "d ffn.down_w", "d in of ffn.gate", "d ffn.gate_w")
    return isinstance(work, cost.Product) and work.name in names


SHAPES = [(8192, 4096, 14336), (16384, 4096, 14336), (16384, 8192, 28672), (65536, 2048, 768)]


@pytest.mark.parametrize("limit", [64, 256, 512, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_fit_their_limit(shape: tuple[int, int, int], limit: int) -> None:
    """A step is at most the even one (to whole vectors) and more than half of it; whole where cutting saves nothing."""
    rows, width, hidden = shape
    count = -(-3 * rows * hidden * 2 // (limit << 20))
    found = cost.ffn_tiles(rows, width, hidden, True, 2, limit << 20, "cuda")
    if count == 1 or (shape, limit) == (SHAPES[0], 512):
        assert found == (rows, hidden)
        return
    assert (found[0] < rows) != (found[1] < hidden)
    size, step = (rows, found[0]) if found[0] < rows else (hidden, found[1])
    even = (math.ceil(size / count) + 63) // 64 * 64
    assert even // 2 < step <= even and step % 64 == 0
