"""The measurement behind tuning.tune_ffn: needs a GPU, and the extension's CUDA kernels for the cuBLAS side."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .ffn_configs import FFNConfig
from .ffn_launch import ACTS, ffn_up_bwd, ffn_up_fwd

_CHECKED_ROWS = 256
Values = dict[str, Tensor]
Run = Callable[[], None]


def make_values(n: int, c: int, f: int, act: str, dtype: torch.dtype) -> Values:
    """Operands as the block has them: gate and up halves of one [2F, C], which is cuBLAS's best case."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(rows: int, cols: int, std: float) -> Tensor:
        return torch.randn(rows, cols, generator=generator, device="cuda", dtype=dtype).mul_(std)

    parts = 2 if ACTS[act][1] else 1
    values = {"x": normal(n, c, 1.0), "ddown": normal(n, c, 1.0), "down_w": normal(c, f, c**-0.5)}
    values["gu_w"] = normal(parts * f, c, c**-0.5)
    values |= {"gu": torch.empty(n, parts * f, device="cuda", dtype=dtype)}
    values |= {name: torch.empty(n, f, device="cuda", dtype=dtype) for name in ("h", "dh")}
    return values


def _halves(t: Tensor, f: int, dim: int) -> tuple[Tensor | None, Tensor]:
    """Gate and up; non-gated: none and all."""
    return (t.narrow(dim, 0, f), t.narrow(dim, f, f)) if t.shape[dim] > f else (None, t)


def cublas_runs(v: Values, act: str) -> tuple[Run, Run]:
    """Forward, and the backward of the "inputs" preset up to h, dg, du: as csrc/autograd/ffn.cpp does them."""
    f = v["h"].shape[1]
    gate, up = _halves(v["gu"], f, 1)
    first = up if gate is None else gate
    tail: tuple[Any, ...] = (act, 0.0, 2, f, 0, 0, [])
    ops = torch.ops.ckptfused

    def forward() -> None:
        torch.mm(v["x"], v["gu_w"].t(), out=v["gu"])
        ops.activation_fwd(first, up, None, v["h"], *tail)

    def backward() -> None:
        torch.mm(v["x"], v["gu_w"].t(), out=v["gu"])
        torch.mm(v["ddown"], v["down_w"], out=v["dh"])
        ops.activation_bwd(first, up, v["dh"], None, v["dh"], gate, up, *tail)

    return forward, backward


def triton_runs(v: Values, act: str, config: FFNConfig) -> tuple[Run, Run]:
    """The same values in the same tensors."""
    f = v["h"].shape[1]
    gate_w, up_w = _halves(v["gu_w"], f, 0)
    gate, up = _halves(v["gu"], f, 1)
    tail: tuple[Any, ...] = (act, False, 0.0, 2, f, 0, 0, [], config.name)

    def forward() -> None:
        ffn_up_fwd(v["x"], gate_w, up_w, None, None, None, v["h"], None, None, *tail)

    def backward() -> None:
        ffn_up_bwd(
            v["x"], gate_w, up_w, None, None, None, None, v["ddown"], v["down_w"], None, v["dh"], gate, up, *tail
        )

    return forward, backward


def _results(v: Values, runs: tuple[Run, Run]) -> Values:
    """h of forward; h, dg and du of backward: the first and the last rows."""
    for name in ("h", "dh", "gu"):
        v[name].fill_(torch.nan)
    for run in runs:
        run()
    torch.cuda.synchronize()
    count = min(_CHECKED_ROWS, v["h"].shape[0])
    found = {"h": v["h"], "h again": v["dh"], "dgu": v["gu"]}
    return {name: torch.cat((t[:count], t[-count:])) for name, t in found.items()}


def _truth(v: Values, act: str) -> Values:
    """_results in float64."""
    count, f = min(_CHECKED_ROWS, v["h"].shape[0]), v["h"].shape[1]
    x, ddown = (torch.cat((v[name][:count], v[name][-count:])).double() for name in ("x", "ddown"))
    gate, up = _halves((x @ v["gu_w"].double().t()).requires_grad_(), f, 1)
    from ..reference.activation import activation

    h = activation(gate, up, act)
    leaves = [t for t in (gate, up) if t is not None]
    grads = torch.autograd.grad(h, leaves, ddown @ v["down_w"].double())
    return {"h": h.detach(), "h again": h.detach(), "dgu": torch.cat(grads, 1)}


def wrong(got: Values, cublas: Values, true: Values, dtype: torch.dtype) -> str:
    """What is further from the truth than twice cuBLAS's error and half an ulp allow; "" where all is well."""
    for name, t in true.items():
        size = float(t.norm())
        error, base = (float((run[name].double() - t).norm()) / size for run in (got, cublas))
        allowed = 2 * base + torch.finfo(dtype).eps / 2
        if not error <= allowed:
            return f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"
    return "" if torch.equal(got["h"], got["h again"]) else "h differs in bits between forward and its replay"


def interleaved(runs: Mapping[str, Sequence[Run]], rounds: int, flush: Run) -> dict[str, float]:
    """Median milliseconds of each entry's runs, added up. One of each in turn, the L2 cache flushed before each."""
    times: dict[tuple[str, int], list[float]] = {}
    for counted in [False] * 3 + [True] * rounds:
        events = []
        for name, group in runs.items():
            for i, run in enumerate(group):
                flush()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                events.append(((name, i), begin, end))
        torch.cuda.synchronize()
        for key, begin, end in events if counted else []:
            times.setdefault(key, []).append(begin.elapsed_time(end))
    return {name: sum(statistics.median(times[name, i]) for i in range(len(runs[name]))) for name in runs}


def measure(
    n: int, c: int, f: int, act: str, dtype: torch.dtype, tiles: Sequence[FFNConfig], rounds: int
) -> dict[str, Any]:
    """The table's entry of a shape: the choice, the best tile, milliseconds of forward and backward together."""
    values = make_values(n, c, f, act, dtype)
    true = _truth(values, act)
    runs = {"cublas": cublas_runs(values, act)}
    cublas = _results(values, runs["cublas"])
    for tile in tiles:
        candidate = triton_runs(values, act, tile)
        try:
            fault = wrong(_results(values, candidate), cublas, true, dtype)
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            fault = str(error)
        if fault:
            warnings.warn(f"FFN tile {tile.name} left out at n {n}, c {c}, f {f}, {act}: {fault}", stacklevel=3)
        else:
            runs[tile.name] = candidate
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def flush() -> None:
        cache.zero_()

    times = interleaved(runs, rounds, flush)
    return entry_of(times) | {"torch": torch.__version__, "triton": triton.__version__, "rounds": rounds}


def entry_of(times: Mapping[str, float]) -> dict[str, Any]:
    """The fastest wins; cuBLAS where it is a tie."""
    tiles = [name for name in times if name != "cublas"]
    best = min(tiles, key=lambda name: times[name], default=None)
    faster = best is not None and times[best] < times["cublas"]
    return {
        "choice": best if faster else "cublas",
        "triton": best,
        "cublas_ms": times["cublas"],
        "triton_ms": None if best is None else times[best],
        "all_ms": dict(times),
    }
