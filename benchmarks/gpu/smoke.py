"""Every kernel once, a block with dropout and blocks in tiles, against the oracle: the first 20 seconds on a GPU.

    python -m benchmarks.gpu.smoke
    python -m benchmarks.gpu.smoke --only rms_norm_forward

Each check is a process of its own, several at once. One that fails is run again with every kernel waited for, and under
compute-sanitizer; what comes back names the worst element.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.differences import expect_close
from benchmarks.gpu import block_checks, isolated
from benchmarks.gpu.timing import parser, write
from benchmarks.ops import SMALL, TINY
from benchmarks.row_ops import OP_NAMES, Make
from benchmarks.row_ops import check as check_op
from benchmarks.tables import table
from ckptfused import rng

AT_ONCE = 8
LIMIT = 60  # seconds of one; those that compile Triton kernels take longest


def dropout_mask(name: str, device: str, tiny: bool) -> str:
    """Made there and here from one state, which the generator there made."""
    state = rng.state(torch.empty(1, device=device))
    for shape in ([3, 67], [5, 1], [2, 4096]):
        there, here = (rng.dropout_mask(shape, 0.1, one, 1) for one in (state, state.cpu()))
        expect_close(f"mask of {shape}", there.float().cpu(), here.float(), 0.0)
    return f"seed {state.tolist()[0]}"


def row_op(name: str, device: str, tiny: bool) -> str:
    return f"error {check_op(name, getattr(Make(TINY if tiny else SMALL, device), name)()):.1e}"


CHECKS: dict[str, Callable[[str, str, bool], str]] = {
    "launches without Python": block_checks.recorded,
    **dict.fromkeys(block_checks.CHECKS, block_checks.run),
    **dict.fromkeys(OP_NAMES, row_op),
    "random state and masks": dropout_mask,
}


def one(options: Namespace) -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    said = CHECKS[options.only](options.only, options.device, options.tiny)
    if options.device == "cuda":
        torch.cuda.synchronize()
    isolated.give({"seconds": time.perf_counter() - start, "said": said})


def every(options: Namespace) -> None:
    words = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    at_once = AT_ONCE if options.device == "cuda" else 2
    ended: list[isolated.Ended] = []
    start = time.perf_counter()
    limit = LIMIT if options.device == "cuda" else isolated.UNHURRIED
    for each in isolated.run_each(__spec__.name, list(CHECKS), words, at_once, limit):
        ended.append(each)
        save(options, ended, time.perf_counter() - start)
    isolated.examine(__spec__.name, ended, words, limit)
    seconds = time.perf_counter() - start
    path = save(options, ended, seconds)
    rows: list[list[object]] = [
        [one.name, "FAILED" if one.error else "ok", one.result.get("said", ""), f"{one.result.get('seconds', 0):.1f}"]
        for one in sorted(ended, key=lambda one: (bool(one.error), list(CHECKS).index(one.name)))
    ]
    print(table(["check", "result", "", "s"], rows))
    print(isolated.shown(ended))
    print(f"written: {path}")
    if failed := isolated.failures(ended):
        raise SystemExit(f"{len(failed)} of {len(CHECKS)} failed: {', '.join(failed)}")
    print(f"{len(ended)} checks are right, {seconds:.0f} s")


def save(options: Namespace, ended: list[isolated.Ended], seconds: float) -> Any:
    right = {one.name: one.result for one in ended if not one.error}
    result = {"seconds": seconds, "right": right, "failed": isolated.failures(ended), "goals": []}
    return write(options, "smoke", result)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--only", choices=CHECKS, metavar="NAME", help="this check, in this process")
    options = words.parse_args()
    (one if options.only else every)(options)


if __name__ == "__main__":
    main()
