"""Devices by name: what they reach of what their datasheets say (`ckptfused.simulate.cards`).

The share that a product or a copy reaches was measured on one card, an H200: 790 of 989 TFLOP/s in bfloat16 by cuBLAS,
4.3 of 4.8 TB/s. The other cards are taken to reach the same shares.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ckptfused.simulate.alone import Like
from ckptfused.simulate.cards import CARDS, GIB, Card, device_name
from ckptfused.simulate.cpu_timings import LARGEST, LONGEST, CpuTimings, product
from ckptfused.state.generators import undrawn

PRODUCT_SHARE, COPY_SHARE = 790 / 989, 4.3 / 4.8


@dataclass(frozen=True)
class Device:
    """Rates are what a program reaches, in FLOP/s and bytes/s."""

    name: str
    kind: str
    """`"cuda"` or `"cpu"`."""
    memory: int
    """Bytes that PyTorch finds of it, rounded down; 0: not known."""
    products: dict[torch.dtype, float]
    """FLOP/s of matrix products, by the type of the operands."""
    attention: float
    """FLOP/s of attention in half precision; in another type it is slower as products are."""
    copy: float
    """Bytes read and written together."""
    multiprocessors: int
    """Multiprocessors that products' tiles are dealt out to; 1: they are not."""
    launch: float
    """Seconds that an op takes beside its work."""
    link: float
    """Bytes/s to the host's memory and back, one way at a time."""
    tiled: float = 1.0
    """Share of attention's rate by tiles of queries, whose kernel may be another."""
    time_error: float | None = None
    """The largest relative error of a predicted step that was found; None: no step was measured there."""
    functions: float = math.inf
    """Entries/s of an elementary function (exp, erf), where memory does not hold it up first."""
    draws: float = math.inf
    """Random numbers/s."""
    machine: CpuTimings | None = None
    """The one at hand, if the device is it."""
    capability: tuple[int, int] = (0, 0)
    """A GPU's, as NVIDIA has it."""

    def product_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of products of this type; of one that is not known, of float32."""
        return self.products.get(dtype, self.products[torch.float32])

    def attention_rate(self, dtype: torch.dtype, tiled: bool = False) -> float:
        """FLOP/s of attention in this type, whole or by tiles of queries."""
        half = self.product_rate(torch.bfloat16)
        return self.attention * (self.tiled if tiled else 1.0) * min(1.0, self.product_rate(dtype) / half)

    def product_seconds(self, rows: int, columns: int, depth: int, dtype: torch.dtype, batch: int = 1) -> float:
        """Seconds of a product in a block of ckptfused, [batch, rows, depth] x [batch, depth, columns]."""
        rated = self.product_rated(rows, columns, depth, dtype, batch)
        if batch > 1:
            return rated
        return self.alone(rated, product, (Like.matrix(rows, depth, dtype), Like.matrix(columns, depth, dtype).t()))

    def product_rated(self, rows: int, columns: int, depth: int, dtype: torch.dtype, batch: int = 1) -> float:
        """By waves: tiles of the output are dealt out to the multiprocessors, and the last round takes as long as any.
        Where the output is small the depth is split.
        """
        moved = batch * (rows * columns + depth * (rows + columns)) * dtype.itemsize
        flops: float = 2 * batch * rows * columns * depth
        if self.multiprocessors > 1:
            flops = min(_wave_flops(rows, columns, depth, batch, self.multiprocessors, tile) for tile in _TILES)
        return max(flops / self.product_rate(dtype), moved / self.copy) + self.launch

    def alone(self, rated: float, function: Any, args: Any, kwargs: Any = None, size: int = 0) -> float:
        """What an op takes on the machine at hand, or what it is rated at. size: in bytes, of operands and results."""
        if self.machine is None or rated > LONGEST or size > LARGEST:
            return rated
        found = self.machine.seconds(function, args, kwargs)
        return rated if found is None else found


_TILES = ((128, 256), (128, 128), (128, 64), (64, 64), (128, 16), (16, 128))
_FED = 128 * 128 / (128 + 128)
"""Results for each operand read, in a tile of 128 x 128: in smaller ones products wait for their operands."""


@lru_cache(maxsize=4096)
def _wave_flops(rows: int, columns: int, depth: int, batch: int, multiprocessors: int, tile: tuple[int, int]) -> float:
    """What the multiprocessors could multiply in the time that they take."""
    share = min(1.0, tile[0] * tile[1] / (tile[0] + tile[1]) / _FED)
    tiles = batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    splits = min(max(1, multiprocessors // max(tiles, 1)), max(1, depth // 256))
    waves = math.ceil(tiles * splits / multiprocessors)
    return waves * multiprocessors * 2 * tile[0] * tile[1] * math.ceil(depth / splits) / share


def _gpu(card: Card) -> Device:
    rates = {torch.bfloat16: card.half, torch.float16: card.half}
    rates |= {torch.float32: card.single, torch.float64: card.single / 2}
    products = {dtype: rate * 1e12 * PRODUCT_SHARE for dtype, rate in rates.items()}
    size, copy = int(card.memory * GIB), card.bandwidth * 1e12 * COPY_SHARE
    attention, link = card.attention * 1e12, card.link * 1e9
    rated = Device(card.name, "cuda", size, products, attention, copy, card.multiprocessors, 3e-6, link, card.tiled)
    return replace(rated, capability=card.capability)


DEVICES: dict[str, Device] = {name: _gpu(card) for name, card in CARDS.items()}
CPU_TIME_ERROR = 0.60
"""The largest of the models of `python -m benchmarks profile-error` and of the ways of training of `profile-order` in
three runs on two quiet cores: 0.77 to 1.60 times what was measured."""
NAMES = (*CARDS, "cpu")


@undrawn()  # a processor's rates are measured with random numbers, too
def device_named(name: str | torch.device) -> Device:
    """One of `NAMES`, as people write them, or PyTorch's own "cpu" and "cuda". **Raises** `ValueError` for another."""
    try:
        found = device_name(str(name))
    except ValueError as error:
        raise ValueError(f"device: {error}") from None
    if found.startswith("cuda"):
        return _gpu_at_hand(found)
    return _cpu(torch.get_num_threads()) if found == "cpu" else DEVICES[found]


def _gpu_at_hand(name: str) -> Device:
    """The card that it is, with the memory that PyTorch finds."""
    if not torch.cuda.is_available():
        raise ValueError(f"device: expected a GPU for {name!r}, and PyTorch sees none: name one of {', '.join(NAMES)}")
    found = torch.cuda.get_device_properties(name)
    own = re.sub(r"[^a-z0-9]", "", found.name.lower())
    alike = [device for device in DEVICES.values() if device.name.partition("-")[0] in own]
    if not alike:
        raise ValueError(
            f"device: expected a GPU of the kinds {', '.join(DEVICES)}, got {found.name!r} for {name!r}: name the one "
            "of them that is most like it"
        )
    nearest = min(alike, key=lambda device: abs(device.memory - found.total_memory))
    return replace(nearest, memory=found.total_memory)


@lru_cache(maxsize=8)
def _cpu(threads: int) -> Device:
    """This machine with so many threads: measured in one of its own, where no mode, autocast or ledger of the caller's
    is at work."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_measured, threads).result()


@torch.random.fork_rng(devices=())
def _measured(threads: int) -> Device:
    """In a fraction of a second."""
    if torch.get_num_threads() != threads:  # a new thread begins with as many as the environment says
        torch.set_num_threads(threads)
    products = {dtype: _product_rate(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    products[torch.float16] = products[torch.bfloat16]
    a = torch.ones(4 << 20)
    b, out = torch.ones_like(a), torch.ones_like(a)
    copy = 3 * a.nbytes / _seconds(lambda: torch.add(a, b, out=out))
    functions = a.numel() / _seconds(lambda: F.gelu(a))
    draws = a.numel() / _seconds(lambda: out.bernoulli_(0.5))
    q = torch.ones(1, 4, 256, 64)
    attention = 4 * 4 * 256 * 256 * 64 / _seconds(lambda: F.scaled_dot_product_attention(q, q, q))
    half = attention * max(1.0, products[torch.bfloat16] / products[torch.float32])
    link, here = copy / 2, CpuTimings(threads)
    return Device(
        "cpu", "cpu", 0, products, half, copy, 1, _launch(), link, 1.0, CPU_TIME_ERROR, functions, draws, here
    )


def _product_rate(dtype: torch.dtype) -> float:
    a = torch.ones(512, 512, dtype=dtype)
    return 2 * 512**3 / _seconds(lambda: a @ a)


def _launch() -> float:
    """Seconds of an op on next to nothing."""
    one = torch.ones(1)
    return _seconds(lambda: [one.add_(1) for _ in range(100)]) / 100


def _seconds(function: Callable[[], object]) -> float:
    """The least of a few calls."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)
