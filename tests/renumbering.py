"""The numbers of a block's channels and hidden units exchanged: the same values, added up in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ckptfused.spec import BlockSpec
from tests.oracle import Inputs, plain, run

_INPUTS = {"o": None, "down": "F"}  # what a projection reads; the others read C
_OUTPUTS = {"attn.o": "C", "ffn.down": "C", "ffn.gate": "F", "ffn.up": "F"}
Axes = tuple[str | None, ...]


def _axes(name: str, spec: BlockSpec) -> Axes:
    """Which dimension of a parameter counts channels (C), which hidden units (F)."""
    half, slot = name.split(".", 1)
    settings = getattr(spec, half)
    if slot.startswith("lora"):
        index, kind = slot.split(".")
        target = settings.lora[int(index[4:])].target
        into, out = _INPUTS.get(target, "C"), _OUTPUTS.get(f"{half}.{target}")
        return {"a": (None, into), "b": (out, None), "bias": (out,)}[kind]
    if slot in ("sinks", "coefficients"):
        return (None,)
    stem, kind = slot.rsplit("_", 1)
    if stem in ("pre", "post", "out"):
        return (None, "C") if settings.modulated and stem != "out" else ("C",)
    if stem in ("q_norm", "k_norm"):
        return (None,)
    if kind == "b":
        return (_OUTPUTS.get(f"{half}.{stem}"),)
    axes = (_OUTPUTS.get(f"{half}.{stem}"), _INPUTS.get(stem, "C"))
    return axes[::-1] if settings.transposed else axes


class Renumbering:
    """A permutation of the channels and one of the hidden units, for everything that a block takes and gives.

    The same block on the same numbers, which adds them up in another order: a run of it rounds afresh.
    """

    def __init__(self, spec: BlockSpec, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.orders = {"C": torch.randperm(width, generator=generator)}
        if spec.ffn is not None:
            self.orders["F"] = torch.randperm(spec.ffn.hidden, generator=generator)
        self.places = {axis: order.argsort() for axis, order in self.orders.items()}

    def _take(self, t: Tensor, axes: Axes, back: bool = False) -> Tensor:
        for dim, axis in enumerate(axes):
            if axis is not None:
                order = (self.places if back else self.orders)[axis].to(t.device)
                joint = t.size(dim) == 2 * len(order)  # gate and up in one matrix
                t = t.index_select(dim, torch.cat((order, order + len(order))) if joint else order)
        return t

    def inputs(self, inputs: Inputs) -> Inputs:
        params = {name: self._take(t, _axes(name, self.spec)) for name, t in inputs.params.items()}
        x, dy = (self._take(t, (None, None, "C")) for t in (inputs.x, inputs.dy))
        return replace(inputs, x=x, dy=dy, params=params)

    def back(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results of the renumbered block, as the block itself numbers them."""

        def axes(name: str) -> Axes:
            return (None, None, "C") if name in ("y", "d x") else _axes(name.removeprefix("d "), self.spec)

        return {name: self._take(t, axes(name), back=True) for name, t in results.items()}

    def masks(self, masks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        targets = [one.target for half in (self.spec.attn, self.spec.ffn) if half is not None for one in half.lora]
        axes = {0: None, 1: "C", 2: "F", 3: "C"} | {4 + n: _INPUTS.get(t, "C") for n, t in enumerate(targets)}
        return {site: self._take(mask, (None,) * (mask.dim() - 1) + (axes[site],)) for site, mask in masks.items()}

    def run(self, inputs: Inputs, masks: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """What eager PyTorch makes of the renumbered block, as `oracle.run` gives it."""
        return self.back(run(plain(self.spec, self.masks(masks), eager=True), self.inputs(inputs)))
