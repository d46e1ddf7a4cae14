"""Memory and time of a block over a long sequence, whole and by tiles of queries.

One Llama-style block that saves its input only, forward and backward, trained in full or beside adapters (then x and
the adapters get gradients). Each variant runs in a process of its own, two steps where one takes less than a minute;
what the ledger says of its backward is beside the most that was allocated in the last. The largest lengths run by tiles
alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Column, Rows, Sizes, Steps, mib, number, option
from benchmarks.checks import worst_error
from benchmarks.ffn_scratch import block_tensors, gradients
from benchmarks.memory import memory_of
from ckptfused import cost
from ckptfused.functional import block
from ckptfused.spec import Adapter, AttentionSpec, BlockSpec, FFNSpec

WHOLE = 1 << 40
"""A limit that cuts nothing."""
CHECKED_TOKENS = 512
LONG = 60.0
"""Seconds of a step after which there is no second one."""


@dataclass(frozen=True, kw_only=True)
class LongSizes(Sizes):
    """The block and its input."""

    tokens: int = option(16384, 32768, 65536, 131072)
    width: int = 512
    hidden: int = 1408
    heads: int = 8
    scratch: int = 64 << 20
    untiled: int = 32768
    """Tokens up to which the block runs whole, too."""

    def spec(self, scratch: int, lora: bool) -> BlockSpec:
        """The block with so many bytes of scratch."""
        targets = ("q", "k", "v", "o") if lora else ()
        adapters = tuple(Adapter(name, 16, 2.0) for name in targets)
        d = self.width // self.heads
        attention = AttentionSpec(self.heads, self.heads, d, pre="rmsnorm", causal=True, lora=adapters)
        return BlockSpec(attention, FFNSpec("swiglu", self.hidden, pre="rmsnorm"), scratch=scratch)

    def limit(self, variant: str) -> int:
        """The scratch of a variant."""
        return WHOLE if variant.startswith("whole") else self.scratch


def tensors(sizes: LongSizes, lora: bool, tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The tensors of the block; beside adapters these alone ask for gradients."""
    x, dy, params = block_tensors(sizes.spec(WHOLE, lora), tokens, sizes.width, torch.bfloat16, sizes.seed)
    for name, t in params.items():
        t.requires_grad_(not lora or "lora" in name)
    return x, dy, params


def check(sizes: LongSizes, steps: Any = None) -> str:
    """Raises unless the gradients by tiles are right, as `checks.worst_error`; returns what was shown."""
    worst = 0.0
    for lora in (False, True):
        x, dy, params = tensors(sizes, lora, CHECKED_TOKENS)
        exact = gradients(
            sizes.spec(WHOLE, lora),
            x.detach().double().requires_grad_(),
            dy.double(),
            {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in params.items()},
        )
        whole = gradients(sizes.spec(WHOLE, lora), x, dy, params)
        tiles = gradients(sizes.spec(sizes.scratch * CHECKED_TOKENS // sizes.tokens, lora), x, dy, params)
        worst = max(worst, worst_error(exact, whole, tiles, torch.bfloat16))
    return f"gradients by tiles at most {worst:.2f} of the allowed error against float64"


def variants(sizes: LongSizes) -> Steps:
    ways = ("whole", "tiles") if sizes.tokens <= sizes.untiled else ("tiles",)
    return dict.fromkeys(f"{way}, {trained}" for trained in ("all trained", "LoRA") for way in ways)


def measured(sizes: LongSizes, variant: str) -> dict[str, Any]:
    """Seconds of the fastest step, the most bytes that its backward held, and those of the ledger."""
    lora = variant.endswith("LoRA")
    x, dy, params = tensors(sizes, lora, sizes.tokens)
    spec = sizes.spec(sizes.limit(variant), lora)
    leaves = {"x": x, **{name: t for name, t in params.items() if t.requires_grad}}
    seconds: list[float] = []
    peak = 0
    while not seconds or (len(seconds) < 2 and seconds[0] < LONG):
        begin = time.perf_counter()
        y = block(x, params, spec)
        memory = memory_of(partial(torch.autograd.grad, y, list(leaves.values()), dy))
        seconds.append(time.perf_counter() - begin)
        peak = memory.peak
    call = (spec, 1, sizes.tokens, sizes.width, torch.bfloat16)
    types = {name: t.dtype for name, t in params.items()}
    said = cost.backward_scratch(*call, needs=[*leaves], params=types)
    return {"seconds": min(seconds), "peak": peak, "said": said}


def shape(sizes: LongSizes, rows: Rows) -> str:
    return (
        f"bfloat16, one pre-norm block, C {sizes.width}, F {sizes.hidden}, SwiGLU, {sizes.heads} heads, causal, one "
        f"sequence of {sizes.tokens:,} tokens; tiles: `scratch={sizes.scratch >> 20}MiB`."
    )


def over_whole(row: dict[str, Any], rows: Rows) -> str:
    """The time over that of the block in one piece."""
    name = next(name for name, one in rows.items() if one is row)
    base = rows.get(name.replace("tiles", "whole"), {}).get("seconds")
    return f"{row['seconds'] / base:.2f}×" if base else ""


BENCHMARK = Benchmark(
    name="long-block",
    doc=__doc__,
    sizes=LongSizes(),
    variants=variants,
    check=check,
    alone=measured,
    columns=(
        number("a step, s", "seconds", ",.1f"),
        Column("time", over_whole),
        mib("peak of backward", "peak"),
        mib("by the ledger", "said"),
        Column("measured / ledger", lambda row, rows: f"{row['peak'] / row['said']:.4f}"),
    ),
    case=lambda sizes: f"{sizes.tokens} tokens",
    stem=lambda sizes: f"long-block-{sizes.width}",
    shape=shape,
)
