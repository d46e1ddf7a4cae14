"""The measurement behind tune.tune_ffn: a block's own calls, with its gate and up products going one way or another.

It needs a GPU, and the extension's CUDA kernels for the cuBLAS side. All but the times comes about on the CPU as well,
in Triton's interpreter.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ckptfused.eager.activation import activation
from ckptfused.ffn_tiles import cut, ffn_tiles
from ckptfused.spec import AUX_NAMES, BlockSpec, FFNSpec, param_names
from ckptfused.triton.ffn.configs import FFNConfig
from ckptfused.triton.tuning import CUBLAS, going

# Of a block that keeps no gu, and of one that keeps it.
FORWARD_PATH, REPLAYING, KEEPING, KEPT = PATHS = "forward", "replaying backward", "keeping forward", "kept backward"
_CHECKED_ROWS, _CHECKED_COLUMNS = 256, 8
_FLUSHED = 256 << 20  # bytes: more than any L2 cache has
TimedRun = Callable[[], list[Tensor]]
Runs = Mapping[str, TimedRun]  # by path
Results = dict[str, dict[str, Tensor]]  # by value and path; of the truth, which has no path: ""
Times = Mapping[str, Mapping[str, float]]  # milliseconds by way and path


@dataclass
class Operands:
    """Operands of a call of an FFN half without norm, biases and dropout."""

    spec: FFNSpec
    x: Tensor  # [1, N, C], as dy
    dy: Tensor
    gu_w: Tensor  # gate and up as one [2F, C], which is cuBLAS's best case; not gated: [F, C]
    down_w: Tensor  # [C, F]


def make_operands(n: int, c: int, f: int, act: str, dtype: torch.dtype, device: str) -> Operands:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(std)

    spec = FFNSpec(act, f)
    spec = FFNSpec(act, f, joint=spec.gated)
    weights = normal(spec.gu_width, c, std=c**-0.5), normal(c, f, std=f**-0.5)
    return Operands(spec, normal(1, n, c), normal(1, n, c), *weights)


def block_runs(o: Operands, way: str) -> Runs:
    """The calls of a block that goes this way, on every path: y and what is kept, or the gradients."""
    ops, spec = torch.ops.ckptfused, BlockSpec(ffn=o.spec)
    weights = {"ffn.gate_w" if o.spec.gated else "ffn.up_w": o.gu_w, "ffn.down_w": o.down_w}
    slots = [weights.get(name) for name in param_names(spec)]
    needs = [True, *(slot is not None for slot in slots)]
    lean, keeping, aux = spec.to_string(), spec.with_keep(("gu",)).to_string(), [None] * len(AUX_NAMES)

    def forward(text: str, save: bool) -> list[Tensor]:
        with going(way):
            return ops.ffn_block_fwd(o.x, slots, aux, None, text, save)

    def backward(text: str, kept: list[Tensor]) -> list[Tensor]:
        with going(way):
            return ops.ffn_block_bwd(o.dy, o.x, slots, aux, kept, None, text, needs)

    gu = forward(keeping, True)[1:]
    return {
        FORWARD_PATH: lambda: forward(lean, False),
        REPLAYING: lambda: backward(lean, []),
        KEEPING: lambda: forward(keeping, True),
        KEPT: lambda: backward(keeping, gu),
    }


def _rows(t: Tensor) -> Tensor:
    """The first and the last rows of [1, N, ...]."""
    count = min(_CHECKED_ROWS, t.shape[1])
    return torch.cat((t[0, :count], t[0, -count:]))


def _columns(t: Tensor, dim: int, hidden: int) -> Tensor:
    """The first and the last hidden columns, along `dim` of a tensor that has those of gate, then those of up."""
    count = min(_CHECKED_COLUMNS, hidden)
    parts = (part.narrow(dim, at, count) for part in t.split(hidden, dim) for at in (0, hidden - count))
    return torch.cat([*parts], dim)


def results(o: Operands, runs: Runs) -> Results:
    """What every path makes, as far as it is checked."""
    found: Results = {name: {} for name in ("y", "gu", "dx", "d gu_w", "d down_w")}
    for path, run in runs.items():
        made = run()
        if path in (FORWARD_PATH, KEEPING):
            found["y"][path] = _rows(made[0])
            if path == KEEPING:
                found["gu"][path] = _rows(made[1])
        else:
            dx, dgu_w, ddown_w = made
            found["dx"][path] = _rows(dx)
            found["d gu_w"][path], found["d down_w"][path] = (
                _columns(dgu_w, 0, o.spec.hidden), _columns(ddown_w, 1, o.spec.hidden),
            )  # fmt: skip
    return found


def truth(o: Operands) -> Results:
    """The same in float64: rows through all columns, columns through all rows."""
    f = o.spec.hidden

    def hidden(x: Tensor, gu_w: Tensor) -> tuple[Tensor, Tensor]:
        gu = x @ gu_w.t()
        *gate, up = gu.chunk(2 if o.spec.gated else 1, 1)
        return gu, activation(gate[0] if gate else None, up, o.spec.act)

    x, gu_w, down_w = _rows(o.x).double().requires_grad_(), o.gu_w.double(), o.down_w.double()
    gu, h = hidden(x, gu_w)
    y = x + h @ down_w.t()
    (dx,) = torch.autograd.grad(y, x, _rows(o.dy).double())
    gu_w, dy = _columns(gu_w, 0, f).requires_grad_(), o.dy[0].double()
    _, h = hidden(o.x[0].double(), gu_w)
    (dgu_w,) = torch.autograd.grad(h, gu_w, dy @ _columns(down_w, 1, f))
    made = {"y": y, "gu": gu, "dx": dx, "d gu_w": dgu_w, "d down_w": dy.t() @ h}
    return {name: {"": value.detach()} for name, value in made.items()}


def worse_than_cublas(got: Results, cublas: Results, true: Results, dtype: torch.dtype) -> str:
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


def interleaved(ways: Mapping[str, Runs], rounds: int, flush: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Median milliseconds of every path. One of each in turn, the L2 cache flushed before each."""
    times: dict[tuple[str, str], list[float]] = {}
    for counted in [False] * 3 + [True] * rounds:
        events = []
        for name, runs in ways.items():
            for path, run in runs.items():
                flush()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
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
    true, ways = truth(operands), {CUBLAS: block_runs(operands, CUBLAS)}
    cublas = results(operands, ways[CUBLAS])
    for tile in tiles:
        try:
            candidate = block_runs(operands, tile.name)
            fault = worse_than_cublas(results(operands, candidate), cublas, true, dtype)
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            fault = str(error)
        if fault:
            warnings.warn(f"FFN tile {tile.name} left out at n {n}, c {c}, f {f}, {act}: {fault}", stacklevel=3)
        else:
            ways[tile.name] = candidate
    cache = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
    cuts = cut(n, f, ffn_tiles(n, c, f, operands.spec.gated, dtype.itemsize, device=device))
    made = {"torch": torch.__version__, "triton": triton.__version__, "rounds": rounds}
    return entry_of(interleaved(ways, rounds, cache.zero_)) | {"ffn_tiles": cuts, "made_with": made}


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
