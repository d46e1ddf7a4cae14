"""How often one draw decides: `python -m tests.autograd.eager_against_itself`.

The rule ||got - true|| <= 2 ||eager - true|| + half an ulp, held per tensor in a single draw of inputs of the small
configurations, is missed by chance: by eager PyTorch against itself with its channels renumbered (the same sums in
another order), by eager PyTorch with ours as the yardstick, and by ours. The three counts are printed; they are why
tests/autograd/test_block_oracle.py holds the norm over eight draws there, and single draws in larger configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.autograd.test_block_oracle import CASES, DTYPES
from tests.oracle import Errors, expect, fused, make_inputs, masks_of, rng_state, run
from tests.renumbering import Renumbering

SEEDS = range(3)


def main() -> None:
    """Counts over all configurations of test_block_oracle, in both types."""
    torch.set_num_threads(1)
    missed = {"eager PyTorch, renumbered, against eager PyTorch": 0, "eager PyTorch against ours": 0}
    missed["ours against eager PyTorch"] = total = 0
    runs = [(case, dtype, seed) for case in CASES for dtype in DTYPES for seed in SEEDS]
    for case, dtype, seed in track(runs, console=Console(stderr=True)):
        inputs, spec = make_inputs(case, dtype, seed), case.spec()
        masks = masks_of(spec, inputs, rng_state(inputs.x), slow=False)
        expected, got = expect(spec, inputs, masks=masks), run(fused(spec), inputs)
        while expected.allow_more():
            pass
        again = Renumbering(spec, case.width, seed).run(inputs, masks)
        first = replace(expected, baselines=expected.baselines[:1])

        def misses(error: float, yardstick: float, dtype: torch.dtype = dtype) -> bool:
            return error > 2 * yardstick + torch.finfo(dtype).eps / 2

        ours: Mapping[str, Errors] = expected.errors(got)
        eager: Mapping[str, Errors] = first.errors(again)
        total += len(ours)
        for name in ours:
            counts = (
                misses(eager[name].got, eager[name].eager),
                misses(ours[name].eager, ours[name].got),
                misses(ours[name].got, ours[name].eager),
            )
            for key, missing in zip(missed, counts, strict=True):
                missed[key] += missing
    table = Table("held against the rule in one draw", "missed", f"of {total}")
    for key, count in missed.items():
        table.add_row(key, str(count), f"{count / total:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
