"""How often one draw decides: `python -m tests.eager_against_itself`.

The rule ||got - true|| <= 2 ||eager - true|| + half an ulp, held per tensor in a single draw of inputs, is missed by
chance: by eager PyTorch against itself with its channels renumbered (the same sums in another order), by eager PyTorch
with ours as the yardstick, and by ours. The three counts are printed; they are why tests/test_block_oracle.py holds
the norm over eight draws instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ckptfused.spec import BlockSpec
from tests.oracle import Errors, Inputs, expect, fused, make_inputs, masks_of, plain, rng_state, run
from tests.test_block_oracle import CASES, DTYPES

SEEDS = range(3)
_INPUTS = {"o": None, "down": "F"}  # what a projection reads; the others read C
_OUTPUTS = {"o": "C", "down": "C", "gate": "F", "up": "F"}
Axes = tuple[str | None, ...]


def _axes(name: str, spec: BlockSpec) -> Axes:
    """Which dimension of a parameter counts channels (C), which hidden units (F)."""
    half, slot = name.split(".", 1)
    settings = getattr(spec, half)
    if slot.startswith("lora"):
        index, kind = slot.split(".")
        target = settings.lora[int(index[4:])].target
        into, out = _INPUTS.get(target, "C"), _OUTPUTS.get(target)
        return {"a": (None, into), "b": (out, None), "bias": (out,)}[kind]
    stem, kind = slot.rsplit("_", 1)
    if stem in ("pre", "post", "out"):
        return ("C",)
    if stem in ("q_norm", "k_norm"):
        return (None,)
    if kind == "b":
        return (_OUTPUTS.get(stem),)
    axes = (_OUTPUTS.get(stem), _INPUTS.get(stem, "C"))
    return axes[::-1] if settings.transposed else axes


class Renumbering:
    """A permutation of the channels and one of the hidden units, for everything that a block takes and gives."""

    def __init__(self, spec: BlockSpec, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.orders = {"C": torch.randperm(width, generator=generator)}
        if spec.ffn is not None:
            self.orders["F"] = torch.randperm(spec.ffn.hidden, generator=generator)

    def _take(self, t: Tensor, axes: Axes) -> Tensor:
        for dim, axis in enumerate(axes):
            if axis is not None:
                order = self.orders[axis]
                joint = t.size(dim) == 2 * len(order)  # gate and up in one matrix
                t = t.index_select(dim, torch.cat((order, order + len(order))) if joint else order)
        return t

    def inputs(self, inputs: Inputs) -> Inputs:
        params = {name: self._take(t, _axes(name, self.spec)) for name, t in inputs.params.items()}
        x, dy = (self._take(t, (None, None, "C")) for t in (inputs.x, inputs.dy))
        return replace(inputs, x=x, dy=dy, params=params)

    def results(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def axes(name: str) -> Axes:
            return (None, None, "C") if name in ("y", "d x") else _axes(name.removeprefix("d "), self.spec)

        return {name: self._take(t, axes(name)) for name, t in results.items()}

    def masks(self, masks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        targets = [one.target for half in (self.spec.attn, self.spec.ffn) if half is not None for one in half.lora]
        axes = {0: None, 1: "C", 2: "F", 3: "C"} | {4 + n: _INPUTS.get(t, "C") for n, t in enumerate(targets)}
        return {site: self._take(mask, (None,) * (mask.dim() - 1) + (axes[site],)) for site, mask in masks.items()}


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
        other = Renumbering(spec, inputs.x.size(-1), seed)
        again = run(plain(spec, other.masks(masks), eager=True), other.inputs(inputs))
        first = replace(expected, baselines=expected.baselines[:1])
        turned = replace(
            first, true=other.results(first.true), kinked=None, baselines=[other.results(first.baselines[0])]
        )

        def misses(error: float, yardstick: float, dtype: torch.dtype = dtype) -> bool:
            return error > 2 * yardstick + torch.finfo(dtype).eps / 2

        ours: Mapping[str, Errors] = expected.errors(got)
        eager: Mapping[str, Errors] = turned.errors(again)
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
