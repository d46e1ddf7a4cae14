"""Scratch limit x attention kernel x preset: step time and peak memory of a Llama-3-8B block in each combination.

    python -m benchmarks.gpu.grid --seconds 90
    CKPTFUSED_ATTENTION=flash python -m benchmarks.gpu.grid --only flash

Each attention kernel is a process of its own: which one is used is read when ckptfused is imported.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from benchmarks.cases import LLAMA_3_8B, TINY
from benchmarks.gpu import isolated
from benchmarks.gpu.block import KEEPS, Variants
from benchmarks.gpu.summary import grid_table
from benchmarks.gpu.timing import Clock, Times, parser, path_of, write
from ckptfused.triton.backend import VARIABLE

ATTENTION = ("cudnn", "flash", "triton")
LIMITS = ("256MiB", "512MiB", "1536MiB", "16GiB")
TINY_LIMITS = ("4KiB", "16GiB")
STARTING = 45


def limits(options: Namespace) -> tuple[str, ...]:
    return TINY_LIMITS if options.tiny else LIMITS


def measured(options: Namespace, variants: Variants) -> list[dict[str, Any]]:
    """One row for each limit and preset, in one run so that all take turns."""
    clock = Clock(options.device)
    names = [(limit, keep) for limit in limits(options) for keep in KEEPS]

    def step(limit: str, keep: str) -> object:
        variants.fused.scratch = limit  # type: ignore[assignment]
        return variants.step(f"ckptfused {keep}")

    calls = {f"{limit} {keep}": lambda limit=limit, keep=keep: step(limit, keep) for limit, keep in names}  # type: ignore[misc]
    times: dict[str, Times] = clock.compare(calls, options.seconds, rounds=20)
    rows = []
    for limit, keep in names:
        variants.fused.scratch = limit  # type: ignore[assignment]
        memory = variants.memory(f"ckptfused {keep}") if options.device == "cuda" else {}
        rows.append({"scratch": limit, "keep": keep, **vars(times[f"{limit} {keep}"]), **memory})
    return rows


def one(options: Namespace) -> None:
    variants = Variants(TINY if options.tiny else LLAMA_3_8B, options.device)
    isolated.give({"kernel": variants.kernel, "rows": measured(options, variants)})


def every(options: Namespace) -> None:
    words = ["--device", options.device, "--seconds", f"{options.seconds / len(ATTENTION):.1f}"]
    words += ["--tiny"] if options.tiny else []
    limit = STARTING + options.seconds if options.device == "cuda" else isolated.UNHURRIED
    ended: list[isolated.Ended] = []
    for name in ATTENTION:  # one after another: they are timed
        command = isolated.command(__spec__.name, name, words)
        ended.append(isolated.run(name, command, limit, {VARIABLE: name}))
        save(options, ended)
    print(grid_table({each.name: each.result for each in ended if not each.error}))
    print(isolated.shown(ended))
    print(f"written: {path_of(options, 'grid')}")
    if failed := isolated.failures(ended):
        raise SystemExit(f"failed: {', '.join(failed)}")


def save(options: Namespace, ended: list[isolated.Ended]) -> None:
    found = {each.name: each.result for each in ended if not each.error}
    write(options, "grid", {"attention": found, "failed": isolated.failures(ended), "goals": []})


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--only", choices=ATTENTION, help="this attention kernel, in this process")
    options = words.parse_args()
    if options.only and os.environ.get(VARIABLE) != options.only:
        words.error(f"--only {options.only}: expected {VARIABLE}={options.only}")
    (one if options.only else every)(options)


if __name__ == "__main__":
    main()
