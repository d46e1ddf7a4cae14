"""The ways through the FFN's first half that tune.tune_ffn measures: a block's calls, tile by tile.

What csrc/autograd/ffn.cpp calls up to h, g, u (forward) and h, dg, du (backward); the rest is the same either way.
tests/triton/test_ffn_paths.py holds the calls, their sizes and strides to those of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cost.tiles import Tile, cut, ffn_tiles
from .ffn_configs import FFNConfig
from .ffn_launch import ACTS, ffn_up_bwd, ffn_up_fwd

# Of a block that keeps no gu, and of one that keeps it.
FORWARD, REPLAYING, KEEPING, KEPT = PATHS = "forward", "replaying backward", "keeping forward", "kept backward"
_SITE = 2
Run = Callable[[], None]
Runs = dict[str, list[Run]]  # of each path one run a tile


@dataclass
class Operands:
    """Of a whole call without biases and dropout. gu_w: gate and up as one [2F, C], which is cuBLAS's best case."""

    act: str
    x: Tensor
    gu_w: Tensor
    down_w: Tensor
    ddown: Tensor
    h: Tensor
    kept: Tensor  # gu [N, 2F]
    scratch: Tensor  # of one tile: gu's and dh's

    @property
    def parts(self) -> int:
        return 2 if ACTS[self.act][1] else 1


@dataclass
class Views:
    """What a tile reads and writes, of the sizes and strides that the block gives it. No gate: None."""

    tile: Tile
    hidden: int
    starts: tuple[int, ...]  # its columns of gu: of gate and of up
    x: Tensor
    ddown: Tensor
    weights: tuple[Tensor | None, Tensor]
    joint_w: Tensor | None  # where the tile has all columns
    down_w: Tensor
    h: Tensor  # columns of [N, F]
    gu: Tensor  # a buffer of the tile's own, as dh; backward has dg, du in it
    gate_up: tuple[Tensor | None, Tensor]
    dh: Tensor  # and then h over it
    kept: Tensor  # rows of gu
    kept_gate_up: tuple[Tensor | None, Tensor]


def make_operands(n: int, c: int, f: int, act: str, dtype: torch.dtype, device: str) -> Operands:
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, cols: int, std: float) -> Tensor:
        return torch.randn(rows, cols, generator=generator, device=device, dtype=dtype).mul_(std)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    parts = 2 if ACTS[act][1] else 1
    rows, cols = ffn_tiles(n, c, f, parts == 2, dtype.itemsize, device="cuda")
    return Operands(
        act, normal(n, c, 1.0), normal(parts * f, c, c**-0.5), normal(c, f, c**-0.5), normal(n, c, 1.0),
        empty(n, f), empty(n, parts * f), empty((parts + 1) * rows * cols),
    )  # fmt: skip


def _parts(t: Tensor, dim: int, starts: Sequence[int], cols: int) -> tuple[Tensor | None, Tensor]:
    found = [t.narrow(dim, start, cols) for start in starts]
    return (found[0], found[1]) if len(found) == 2 else (None, found[0])


def make_views(o: Operands) -> list[Views]:
    """The tiles in the block's order."""
    (n, c), f, parts = o.x.shape, o.h.shape[1], o.parts
    views = []
    for tile in cut(n, f, ffn_tiles(n, c, f, parts == 2, o.x.dtype.itemsize, device="cuda")):
        row0, rows, col0, cols = tile
        starts = tuple(part * f + col0 for part in range(parts))
        # The caching allocator gives a tile the memory of the one before.
        gu = o.scratch[: parts * rows * cols].view(rows, parts * cols)
        dh = o.scratch[parts * rows * cols : (parts + 1) * rows * cols].view(rows, cols)
        kept = o.kept.narrow(0, row0, rows)
        views.append(
            Views(
                tile, f, starts, o.x.narrow(0, row0, rows), o.ddown.narrow(0, row0, rows),
                _parts(o.gu_w, 0, starts, cols), o.gu_w if cols == f else None, o.down_w.narrow(1, col0, cols),
                o.h.narrow(0, row0, rows).narrow(1, col0, cols), gu,
                _parts(gu, 1, [part * cols for part in range(parts)], cols), dh, kept, _parts(kept, 1, starts, cols),
            )
        )  # fmt: skip
    return views


def _mask(v: Views) -> tuple[Any, ...]:
    """Where the tile lies in a mask that drops nothing."""
    return 0.0, _SITE, v.hidden, v.tile[0], v.tile[2], []


def cublas_tile(v: Views, act: str) -> dict[str, Run]:
    """The platform's products and the pointwise kernels."""
    ops, tail = torch.ops.ckptfused, (act, *_mask(v))
    (gate, up), (kept_gate, kept_up) = v.gate_up, v.kept_gate_up
    first, kept_first = up if gate is None else gate, kept_up if kept_gate is None else kept_gate

    def products(out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Block::gu_parts of a joint weight."""
        if v.joint_w is not None:
            return [(v.joint_w.t(), out)]
        weights, cols = [w for w in v.weights if w is not None], v.tile[3]
        return [(w.t(), out.narrow(1, part * cols, cols)) for part, w in enumerate(weights)]

    # A kept gu is made where it stays if its rows are whole, and copied there if not.
    copied = v.joint_w is None
    to_buffer, to_kept = products(v.gu), products(v.gu if copied else v.kept)

    def project(made: list[tuple[Tensor, Tensor]]) -> None:
        for w, out in made:
            torch.mm(v.x, w, out=out)

    def forward() -> None:
        project(to_buffer)
        ops.activation_fwd(first, up, None, v.h, *tail)

    def replaying() -> None:
        project(to_buffer)
        torch.mm(v.ddown, v.down_w, out=v.dh)
        ops.activation_bwd(first, up, v.dh, None, v.dh, gate, up, *tail)

    def keeping() -> None:
        project(to_kept)
        if copied:
            if gate is not None and kept_gate is not None:
                kept_gate.copy_(gate)
            kept_up.copy_(up)
            ops.activation_fwd(first, up, None, v.h, *tail)
        else:
            ops.activation_fwd(kept_first, kept_up, None, v.h, *tail)

    def kept() -> None:
        torch.mm(v.ddown, v.down_w, out=v.dh)
        ops.activation_bwd(kept_first, kept_up, v.dh, None, v.dh, gate, up, *tail)

    return {FORWARD: forward, REPLAYING: replaying, KEEPING: keeping, KEPT: kept}


def triton_tile(v: Views, act: str, config: FFNConfig) -> dict[str, Run]:
    """The same values in the same tensors."""
    tail: tuple[Any, ...] = (act, False, *_mask(v), config.name)
    replay: tuple[Any, ...] = (v.x, *v.weights, None, None)
    down: tuple[Any, ...] = (v.ddown, v.down_w, None, v.dh, *v.gate_up)
    forward = (*replay, None, v.h, None, None, *tail)
    replaying = (*replay, None, None, *down, *tail)
    keeping = (*replay, None, v.h, *v.kept_gate_up, *tail)
    kept = (*(None,) * len(replay), *v.kept_gate_up, *down, *tail)
    return {
        FORWARD: lambda: ffn_up_fwd(*forward),
        REPLAYING: lambda: ffn_up_bwd(*replaying),
        KEEPING: lambda: ffn_up_fwd(*keeping),
        KEPT: lambda: ffn_up_bwd(*kept),
    }


def by_path(tiles: Iterable[dict[str, Run]]) -> Runs:
    runs: Runs = {path: [] for path in PATHS}
    for tile in tiles:
        for path, run in tile.items():
            runs[path].append(run)
    return runs
