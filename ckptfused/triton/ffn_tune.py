"""The measurement behind tune.tune_ffn: needs a GPU, and the extension's CUDA kernels for the cuBLAS side.

All but the times comes about on the CPU as well, in Triton's interpreter.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .ffn_configs import FFNConfig
from .ffn_paths import (
    KEEPING,
    KEPT,
    PATHS,
    REPLAYING,
    Operands,
    Run,
    Runs,
    Views,
    by_path,
    cublas_tile,
    make_operands,
    make_views,
    triton_tile,
)
from .tuning import CUBLAS

_CHECKED_ROWS = 256
_FLUSHED = 256 << 20  # bytes: more than any L2 cache has
Results = dict[str, dict[str, Tensor]]  # by value and path; of the truth, which has no path: ""
Times = Mapping[str, Mapping[str, float]]  # milliseconds by way and path


def _ends(t: Tensor) -> Tensor:
    """The first and the last rows."""
    count = min(_CHECKED_ROWS, t.shape[0])
    return torch.cat((t[:count], t[-count:]))


def results(o: Operands, views: Sequence[Views], runs: Runs) -> Results:
    """h of every path, gu of the one that keeps it, dgu of the backwards; NaN where nothing was written."""
    found: Results = {"h": {}, "gu": {}, "dgu": {}}
    for path in PATHS:
        backward, h, gu = path in (REPLAYING, KEPT), torch.empty_like(o.h), torch.empty_like(o.kept)
        for v, run in zip(views, runs[path], strict=True):
            outs = v.kept_gate_up if path == KEEPING else v.gate_up
            for t in (v.h, v.dh, *outs):
                if t is not None:
                    t.fill_(torch.nan)
            run()
            row0, rows, col0, cols = v.tile
            h[row0 : row0 + rows, col0 : col0 + cols] = v.dh if backward else v.h
            for start, t in zip(v.starts, (t for t in outs if t is not None), strict=True):
                gu[row0 : row0 + rows, start : start + cols] = t
        found["h"][path] = _ends(h)
        if backward or path == KEEPING:
            found["dgu" if backward else "gu"][path] = _ends(gu)
    return found


def truth(o: Operands) -> Results:
    """In float64."""
    from ..eager.activation import activation

    gu = _ends(o.x).double() @ o.gu_w.double().t()
    *gate, up = (t.detach().requires_grad_() for t in gu.chunk(o.parts, 1))
    h = activation(gate[0] if gate else None, up, o.act)
    grads = torch.autograd.grad(h, [*gate, up], _ends(o.ddown).double() @ o.down_w.double())
    return {"h": {"": h.detach()}, "gu": {"": gu}, "dgu": {"": torch.cat(grads, 1)}}


def wrong(got: Results, cublas: Results, true: Results, dtype: torch.dtype) -> str:
    """What is further from the truth than twice cuBLAS's error and half an ulp allow; "" where all is well."""
    for name, values in got.items():
        t = true[name][""]
        for path in values:
            error, base = (float((run[name][path].double() - t).norm() / t.norm()) for run in (got, cublas))
            allowed = 2 * base + torch.finfo(dtype).eps / 2
            if not error <= allowed:
                return f"{name} of the {path}: relative error {error:.2e}, allowed {allowed:.2e}"
        first, *others = values
        for path in others:
            if not torch.equal(values[first], values[path]):
                return f"{name} differs in bits between {first} and {path}"
    return ""


def interleaved(ways: Mapping[str, Runs], rounds: int, flush: Run) -> dict[str, dict[str, float]]:
    """Median milliseconds of every path, all its tiles. One of each in turn, the L2 cache flushed before each."""
    times: dict[tuple[str, str], list[float]] = {}
    for counted in [False] * 3 + [True] * rounds:
        events = []
        for name, runs in ways.items():
            for path, tiles in runs.items():
                flush()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for run in tiles:
                    run()
                end.record()
                events.append(((name, path), begin, end))
        torch.cuda.synchronize()
        for key, begin, end in events if counted else []:
            times.setdefault(key, []).append(begin.elapsed_time(end))
    return {name: {path: statistics.median(times[name, path]) for path in runs} for name, runs in ways.items()}


def measure(
    n: int, c: int, f: int, act: str, dtype: torch.dtype, tiles: Sequence[FFNConfig], rounds: int, device: str = "cuda"
) -> dict[str, Any]:
    """The table's entry of a shape."""
    operands = make_operands(n, c, f, act, dtype, device)
    views, true = make_views(operands), truth(operands)
    ways = {CUBLAS: by_path(cublas_tile(v, act) for v in views)}
    cublas = results(operands, views, ways[CUBLAS])
    for tile in tiles:
        candidate = by_path(triton_tile(v, act, tile) for v in views)
        try:
            fault = wrong(results(operands, views, candidate), cublas, true, dtype)
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            fault = str(error)
        if fault:
            warnings.warn(f"FFN tile {tile.name} left out at n {n}, c {c}, f {f}, {act}: {fault}", stacklevel=3)
        else:
            ways[tile.name] = candidate
    cache = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)

    def flush() -> None:
        cache.zero_()

    made = {"torch": torch.__version__, "triton": triton.__version__, "rounds": rounds}
    return entry_of(interleaved(ways, rounds, flush)) | {"ffn_tiles": [v.tile for v in views], "made_with": made}


def entry_of(times: Times) -> dict[str, Any]:
    """The quickest of the tiles that beat cuBLAS on every path; cuBLAS where there is none.

    Every path, because the one choice of a shape serves them all: whether a block keeps gu is not among what the
    choice may depend on, and a gain in the replay does not make good what a block that never replays would lose.
    """
    total = {name: sum(paths.values()) for name, paths in times.items()}
    behind = {
        name: [path for path, ms in paths.items() if ms >= times[CUBLAS][path]]
        for name, paths in times.items()
        if name != CUBLAS
    }
    best = min(behind, key=lambda name: (bool(behind[name]), total[name]), default=None)
    return {
        "choice": CUBLAS if best is None or behind[best] else best,
        "triton": best,
        "no_faster": [] if best is None else behind[best],
        "cublas_ms": total[CUBLAS],
        "triton_ms": None if best is None else total[best],
        "all_ms": {name: dict(paths) for name, paths in times.items()},
    }
