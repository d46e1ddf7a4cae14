"""Blocks, and models of Hugging Face, whose weights bitsandbytes stores in few bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.spec import QUANT_SLOTS, BlockSpec, Quantized
from ckptfused.spec.experts import ExpertsSpec
from tests.oracle import Inputs

STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


class Way(NamedTuple):
    """One way to store a weight."""

    kind: str
    block: int = 64
    nested: bool = False
    storage: torch.dtype = torch.uint8


WAYS = tuple(
    Way(kind, block, nested, storage)
    for (kind, nested), block, storage in zip(
        itertools.cycle(itertools.product(("nf4", "fp4"), (True, False))),
        (64, 32, 128, 256, 512, 1024, 64, 2048),
        itertools.cycle(STORAGE),
    )
)
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
EVERY_WAY = tuple(map(Way, *zip(*itertools.product(("nf4", "fp4"), BLOCKS, (False, True), STORAGE), strict=True)))
"""All kinds, blocks, nesting and storage crossed, of which `WAYS` has a few."""


def stored(weight: Tensor, way: Way, dtype: torch.dtype) -> tuple[dict[str, Tensor], int, Tensor]:
    """A weight in few bits: its codes (`"w"`) and what stands beside them, how many scales share one, and the numbers
    that bitsandbytes makes of them for a dtype: float32's rounded, or of a table that it rounded before (0.49 where it
    has no kernel)."""
    import bitsandbytes.functional as bnb

    options = {"blocksize": way.block, "compress_statistics": way.nested, "quant_storage": way.storage}
    with torch.compiler.set_stance("force_eager"):  # it would have a C++ compiler run for every shape
        codes, state = bnb.quantize_4bit(weight.float(), quant_type=way.kind, **options)
        state.dtype = dtype if dtype.itemsize == 2 else torch.float32
        plain = bnb.dequantize_4bit(codes, state).to(dtype)
    found = {"w": codes, "scale": state.absmax}
    if way.nested:
        inner = state.state2
        found |= {"nested_scale": inner.absmax, "table": inner.code, "offset": state.offset}
    return found, state.state2.blocksize if way.nested else 0, plain


def quantized(spec: BlockSpec, inputs: Inputs) -> tuple[BlockSpec, dict[str, Tensor], dict[str, Tensor]]:
    """The spec with every projection in few bits, the frozen tensors that these are, and the weights in x's type."""
    frozen: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    ways = itertools.cycle(WAYS)
    halves: dict[str, Any] = {}
    for half, of in spec.halves.items():
        targets = list(of.products(0))
        lists = []
        for i, target in enumerate(targets):
            way = next(ways)
            tensors, nested, plain = stored(inputs.params[f"{half}.{target}_w"], way, inputs.x.dtype)
            lists.append(Quantized(target, way.kind, way.block, nested))
            weights[f"{half}.{target}_w"] = plain
            frozen[f"{half}.{target}_w"] = tensors.pop("w")
            frozen.update((f"{half}.quant{i}.{slot}", tensors[slot]) for slot in QUANT_SLOTS if slot in tensors)
        halves[half] = replace(of, quant=tuple(lists))
    return replace(spec, **halves), frozen, weights


class Stacks(NamedTuple):
    """The weights of experts in few bits, as their op takes them."""

    spec: ExpertsSpec
    up: Tensor
    down: Tensor
    beside: list[Tensor | None]
    numbers: tuple[Tensor, Tensor]
    """The weights of both, in the type of those that were stored."""


def stored_stacks(spec: ExpertsSpec, up: Tensor, down: Tensor, ways: tuple[Way, Way]) -> Stacks:
    """Both stacks of a call in few bits."""
    codes, lists, beside, numbers = [], [], [], []
    for target, stack, way in zip(("up", "down"), (up, down), ways, strict=True):
        tensors, nested, plain = stored(stack.detach(), way, stack.dtype)
        codes.append(tensors["w"].view(torch.uint8).view(stack.size(0), -1))
        lists.append(Quantized(target, way.kind, way.block, nested))
        beside += [tensors.get(slot) for slot in QUANT_SLOTS]
        numbers.append(plain)
    return Stacks(replace(spec, quant=tuple(lists)), codes[0], codes[1], beside, (numbers[0], numbers[1]))


def quantize_linears(model: nn.Module, way: Way, compute: torch.dtype | None = None, head: bool = False) -> None:
    """Puts bitsandbytes' 4-bit layers in the place of all linear layers, but the head unless told to."""
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or (name == "lm_head" and not head):
                continue
            made = bitsandbytes.nn.Linear4bit(
                *(child.in_features, child.out_features, child.bias is not None),
                compute_dtype=compute, compress_statistics=way.nested, quant_type=way.kind, quant_storage=way.storage,
            )  # fmt: skip
            made.load_state_dict(child.state_dict())
            setattr(module, name, made.to("cpu"))
