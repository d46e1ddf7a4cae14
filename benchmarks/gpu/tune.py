"""The FFN's gate and up products on a GPU, by cuBLAS and by every Triton tile, for the shapes of the block's benchmark.

    python -m benchmarks.gpu.tune --out FOLDER

Writes <out>/ffn_tuned.json beside the result file: with CKPTFUSED_CACHE=<out> blocks choose by it. Entries of other
shapes and GPUs stay in it. Every shape is measured in full, however many --seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.cases import LLAMA_3_8B, TINY, Case
from benchmarks.gpu.timing import arguments, write
from benchmarks.tables import tuned_table
from ckptfused.triton import tune, tuning

ACT, DTYPE = "swiglu", torch.bfloat16


def shapes(case: Case) -> Iterator[tuple[int, int, int]]:
    """Rows, width and hidden width: of the measured step, and of the check before it."""
    for rows in (case.batch * case.tokens, min(case.tokens, 4096)):
        yield rows, case.shape.d_model, case.shape.dim_feedforward


def main() -> None:
    options = arguments(__doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["CKPTFUSED_CACHE"] = str(options.out.resolve())
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for n, c, f in shapes(TINY if options.tiny else LLAMA_3_8B):
        name = f"{n} x {c} x {f}, {ACT}"
        try:
            found.append({"shape": name, **tune.tune_ffn(n, c, f, ACT, DTYPE)})
        except RuntimeError as error:
            failed[name] = str(error)
            print(f"{name}: {error}", flush=True)
        result = {"dtype": "bfloat16", "shapes": found, "failed": failed, "goals": []}
        path = write(options, "tune", result)  # after each: if time runs out, what was measured stays
    print(tuned_table(found))
    print(f"written: {path}, {tuning.cache_file()}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
