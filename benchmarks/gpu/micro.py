"""The row kernels on a GPU against the bandwidth of a copy of as many bytes, eager PyTorch, and Liger if installed.

    python -m benchmarks.gpu.micro --seconds 30
    python -m benchmarks.gpu.micro --only rms_norm_forward

bfloat16, the sizes of a Llama-3-8B layer. Each op has a process of its own, holds the GPU alone while it is timed, and
is compared with float32 first. The bytes are those that have to be read and written once.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks import liger
from benchmarks.gpu import isolated
from benchmarks.gpu.timing import Clock, Goal, parser, write
from benchmarks.ops import SMALL, TINY, Op, Sizes
from benchmarks.row_ops import DTYPE, OP_NAMES, Make, check
from benchmarks.tables import goal_table, table

STARTING = 30  # seconds, of a process that imports, waits for the others and checks


def measure(name: str, make: Make, clock: Clock, seconds: float) -> dict[str, Any]:
    op: Op = getattr(make, name)()
    error = check(name, op)
    source = torch.randn(op.moved // 4, device=make.device).to(DTYPE)  # half of the bytes: a copy reads and writes
    target = torch.empty_like(source)
    calls = {"ckptfused": op.ours, "copy": lambda: target.copy_(source), "eager": op.eager}
    if name in liger.OP_NAMES and liger.is_there(make.device):
        calls["liger"] = getattr(Make(make.sizes, make.device, how=liger.instead_of), name)().eager
    times = clock.compare(calls, seconds)
    ours, copy, eager = (times[key].median for key in ("ckptfused", "copy", "eager"))
    return {
        "op": name,
        "bytes": op.moved,
        "milliseconds": {key: vars(value) for key, value in times.items()},
        "GB/s": op.moved / ours / 1e6,
        "copy GB/s": op.moved / copy / 1e6,
        "of copy": copy / ours,
        "eager of copy": copy / eager,
        "liger of copy": copy / times["liger"].median if "liger" in times else None,
        "goal": op.goal,
        "error": error,
    }


def one(options: Namespace) -> None:
    """What a process of its own does."""
    torch.manual_seed(0)
    sizes = TINY if options.tiny else SMALL if options.small else Sizes()
    with isolated.alone(options.lock):
        make = Make(sizes, options.device)
        if options.untimed:
            isolated.give({"error": check(options.only, getattr(make, options.only)())})
            return
        isolated.give(measure(options.only, make, Clock(options.device), options.seconds))


def every(options: Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    lock = options.out / f"{options.stem}_micro.lock"
    seconds = options.seconds / len(options.names) / 2  # as long again for checks, alone on the GPU too
    device = ["--device", options.device]
    words = [*device, "--seconds", f"{seconds:.2f}", "--lock", str(lock), *(["--tiny"] if options.tiny else [])]
    found: list[dict[str, Any]] = []
    ended: list[isolated.Ended] = []
    at_once = 4 if options.device == "cuda" else 2
    limit = STARTING + options.seconds if options.device == "cuda" else isolated.UNHURRIED
    for each in isolated.run_each(__spec__.name, options.names, words, at_once, limit):
        ended.append(each)
        if each.error:
            print(f"{each.name}: {each.error.splitlines()[-1]}", flush=True)
        else:
            found.append(each.result)
        path = save(options, found, ended)  # after each: if time runs out, what was measured stays
    lock.unlink(missing_ok=True)
    isolated.examine(__spec__.name, ended, [*device, "--small", "--untimed"], limit)
    found.sort(key=lambda row: OP_NAMES.index(row["op"]))
    path = save(options, found, ended)
    rows: list[list[object]] = [
        [r["op"], f"{r['milliseconds']['ckptfused']['median']:.4f}", f"{r['GB/s']:.0f}", f"{r['copy GB/s']:.0f}",
         f"{100 * r['of copy']:.1f} %", f"{100 * r['eager of copy']:.1f} %",
         f"{100 * r['liger of copy']:.1f} %" if r["liger of copy"] else "", f"{r['error']:.1e}"]
        for r in found
    ]  # fmt: skip
    print(table(["kernel", "ms", "GB/s", "copy GB/s", "of copy", "eager of copy", "Liger of copy", "error"], rows))
    print(goal_table(goals_of(found)))
    print(isolated.shown(ended))
    print(f"written: {path}")
    if failed := isolated.failures(ended):
        raise SystemExit(f"failed: {', '.join(failed)}")


def goals_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [Goal(f"{r['op']} of copy bandwidth", r["of copy"], r["goal"], True).row() for r in found if r["goal"]]


def save(options: Namespace, found: list[dict[str, Any]], ended: list[isolated.Ended]) -> Path:
    sizes = vars(TINY if options.tiny else Sizes())
    result = {"sizes": sizes, "dtype": "bfloat16", "ops": found, "failed": isolated.failures(ended)}
    return write(options, "micro", {**result, "goals": goals_of(found)})


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--only", choices=OP_NAMES, help="this op, in this process")
    words.add_argument("--names", nargs="+", choices=OP_NAMES, default=OP_NAMES, help="these ops; default: all")
    words.add_argument("--small", action="store_true", help="with --only: in small sizes")
    words.add_argument("--untimed", action="store_true", help="with --only: a check, no times")
    words.add_argument("--lock", type=Path, default=None, help="with --only: held while the GPU is in use")
    options = words.parse_args()
    if options.only:
        one(options)
    else:
        every(options)


if __name__ == "__main__":
    main()
